"""The twins of decode kernels that the model has no operation for, against the model's own forward: equal bits.

Tokens go one by one through a layer and, from the same projections, through its twin, which goes on with what it
returned before; far enough to close groups of 4 and of 128, to wrap the ring, and to have more entries than are chosen.
"""

from __future__ import annotations

import pytest
import torch
from helpers import goldens

import kernels
from kernels.reference import decode as twin
from services.worker.model.attention import Attention
from services.worker.model.compression import Compressor
from services.worker.model.precision import QUANTISED
from services.worker.model.state import CompressorState, LayerState

LENGTH = 140
LAYERS = {0: 0, 4: 2, 128: 3}
"""A layer of each compression ratio."""


def poolings_of(attention: Attention) -> list[twin.Pooling]:
    compressors: list[Compressor] = [] if attention.compressor is None else [attention.compressor]
    compressors += [] if attention.indexer is None else [attention.indexer.compressor]
    return [twin.Pooling(compressor.norm, compressor.bias) for compressor in compressors]


def caches_of(state: LayerState) -> twin.LayerCaches:
    """A copy, keys in the type that a GPU keeps them in."""
    none = torch.zeros(0)
    return twin.LayerCaches(
        state.keys.bfloat16(),
        none if state.compressor is None else state.compressor.rows.clone(),
        none if state.index_keys is None else state.index_keys.bfloat16(),
        none if state.index_compressor is None else state.index_compressor.rows.clone(),
    )


def projections(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    """What `fused_linear` leaves of x [1, hidden]: float32 [n]."""
    low_rank = QUANTISED.linear(QUANTISED.activations(x), attention.wq_a_wkv).float()
    if attention.unquantised is None:
        return low_rank[0]
    return torch.cat((low_rank, kernels.float_linear(x, attention.unquantised)), -1)[0]


def check_rows(rows: torch.Tensor, state: CompressorState | None, position: int) -> None:
    if state is not None:
        used = state.used_rows(position)
        assert torch.equal(rows[:, : used.shape[1]], used)


@pytest.mark.parametrize("ratio", LAYERS)
@torch.inference_mode()
def test_attention_inputs_leave_what_the_model_leaves(ratio: int) -> None:
    model = goldens.shared("quantised").model
    c, attention = model.config, model.layers[LAYERS[ratio]].attention
    assert c.compress_ratios[LAYERS[ratio]] == ratio
    state = model.new_state(LENGTH).layers[LAYERS[ratio]]
    rotations = kernels.rope_table(model.frequencies(ratio), LENGTH)
    poolings, caches = poolings_of(attention), caches_of(state)
    weights = attention.q_norm, attention.kv_norm, poolings, rotations
    for position, x in enumerate(torch.randn(LENGTH, 1, c.hidden_size, generator=torch.Generator().manual_seed(ratio))):
        y = projections(attention, x.bfloat16())
        with goldens.recorded(Attention, "attend") as calls:
            attention.forward(x.bfloat16(), state, position)
        got = twin.attention_inputs(y, position, *weights, caches, c.sliding_window, c.rms_norm_eps)
        caches = got.caches
        low_rank = got.codes.view(torch.float8_e4m3fn).float() * got.scales.repeat_interleave(128)
        q = QUANTISED.linear(low_rank.unsqueeze(0), attention.wq_b)[:, : c.num_attention_heads * c.head_dim]
        q = kernels.head_norm(q.view(1, c.num_attention_heads, c.head_dim), c.rms_norm_eps)
        assert torch.equal(calls[0].arguments[0], kernels.rope(q, rotations[position : position + 1]))
        assert torch.equal(caches.keys.float(), state.keys)
        check_rows(caches.compressor, state.compressor, position + 1)
        check_rows(caches.index_compressor, state.index_compressor, position + 1)
        if state.index_keys is not None:
            assert torch.equal(caches.index_keys.float(), state.index_keys)
    closed = LENGTH // ratio if ratio else 0
    assert state.entries[:closed].any(-1).all(), "no group was closed"


@torch.inference_mode()
def test_index_scores_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model = goldens.shared("quantised").model
    c, attention = model.config, model.layers[LAYERS[4]].attention
    state = model.new_state(LENGTH).layers[LAYERS[4]]
    rotations = kernels.rope_table(model.frequencies(4), LENGTH)
    scored: list[torch.Tensor] = []

    def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        scored.append(original(q, k, weights))
        return scored[-1]

    original = kernels.index_scores
    monkeypatch.setattr(kernels, "index_scores", index_scores)
    for position, x in enumerate(torch.randn(LENGTH, 1, c.hidden_size, generator=torch.Generator().manual_seed(1))):
        with goldens.recorded(Attention, "_index") as calls:
            attention.forward(x.bfloat16(), state, position)
        projected, low_rank = calls[0].arguments[:2]
        q = QUANTISED.linear(low_rank, attention.wq_b)[0, c.num_attention_heads * c.head_dim :].float()
        assert state.index_keys is not None
        keys = state.index_keys[: (position + 1) // 4].bfloat16()
        q, w = q.view(c.index_n_heads, -1), projected[0, -c.index_n_heads :]
        assert len(scored) == max(0, position + 2 - 4 * (c.index_topk + 1)), "the model scores once it has to choose"
        if scored:
            assert torch.equal(twin.index_scores(q, w, keys, rotations[position]), scored[-1][0])
    assert len(scored) > LENGTH // 3
