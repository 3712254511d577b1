"""The table of a step's launches is that of the real step, kernel by kernel and weight by weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.decode_launches import OUTSIDE, step_launches
from kernels.tile import TileKernel
from services.worker.decode import step as step_module
from services.worker.decode.buffers import Buffers
from services.worker.decode.control import Control
from services.worker.decode.extent import Extent
from services.worker.decode.states import LayerTensors
from services.worker.decode.step import DecodeStep
from services.worker.decode.weights import Fp8, LayerWeights, Pooling, StepWeights
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout
from shared.checkpoint.synth_shapes import published_config
from shared.config import load_config
from shared.planning.machine import load_machine
from shared.planning.plan import make_plan

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig.from_published(published_config("full", 8, 256))
META = torch.device("meta")
SHORT, LONG = Extent(2048), Extent(8192)
DENSE = {f"{name}_kernel" for name in ("fused_linear", "grouped_linear", "quantised_linear", "attention_write")}
"""What these read is all among their arguments."""


def test_the_bytes_are_those_of_the_plan() -> None:
    """But for the indexer's queries, which a short context has no use for, and what norms and caches take."""
    machine = load_machine(ROOT / "configs" / "machines" / "spark.toml")
    cost = make_plan(load_config(ROOT / "configs" / "spark.toml"), CONFIG, machine).cost
    total = sum(launch.nbytes for launch in step_launches(CONFIG, LONG, 4000))
    assert total == pytest.approx(cost.memory_bytes, rel=0.002)
    assert sum(launch.nbytes for launch in step_launches(CONFIG, SHORT, 500)) < total


def test_only_the_ends_of_a_step_are_outside_of_layers() -> None:
    launches = step_launches(CONFIG, SHORT, 500)
    assert [launch.part for launch in launches if launch.part != "layer"] == [
        "start",
        "head",
        "head",
        "sampling",
        "sampling",
    ]
    assert set(OUTSIDE) == {"start", "head", "sampling"}


@pytest.mark.parametrize("extent", [SHORT, LONG])
@pytest.mark.parametrize("guesses", [True, False])
def test_the_launches_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch, extent: Extent, guesses: bool) -> None:
    launched = _launched(monkeypatch, extent, guesses)
    table = step_launches(CONFIG, extent, extent.positions - 1, guesses)
    assert [name for name, _ in launched] == [launch.kernel for launch in table]
    for (name, matrices), launch in zip(launched, table, strict=True):
        if name in DENSE:
            assert launch.nbytes == matrices, launch


@pytest.mark.parametrize(("extent", "indexed"), [(SHORT, 15), (LONG, 16)])
def test_launches_of_a_layer(extent: Extent, indexed: int) -> None:
    """15; one more where entries are chosen, which is beyond the indexer's topk."""
    layers = [launch for launch in step_launches(CONFIG, extent, 500) if launch.part == "layer"]
    choosing = CONFIG.compress_ratios[: CONFIG.num_hidden_layers].count(4)
    assert len(layers) == 15 * (CONFIG.num_hidden_layers - choosing) + indexed * choosing


def _launched(monkeypatch: pytest.MonkeyPatch, extent: Extent, guesses: bool) -> list[tuple[str, int]]:
    """Of a step on tensors without memory: each kernel, and the bytes of the matrices that it is given."""
    launched: list[tuple[str, int]] = []

    def note(kernel: TileKernel, **sizes: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
            launched.append((kernel.entry, sum(t.nbytes for t in tensors if t.dim() == 2 and len(t) > 1)))

        return launch

    zeros = torch.zeros
    monkeypatch.setattr(TileKernel, "__call__", note)
    monkeypatch.setattr(step_module, "host_view", lambda tensor, device: tensor)
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    model = _model()
    control = Control.scratch(CONFIG.num_moe_layers, CONFIG.n_routed_experts, META)
    layers = range(CONFIG.num_hidden_layers)
    hashed = empty(CONFIG.num_hash_layers, CONFIG.vocab_size, CONFIG.num_experts_per_tok, dtype=torch.int16)
    weights = StepWeights([_weights(layer, guesses) for layer in layers], hashed, guesses)
    tensors = [_tensors(layer, extent) for layer in layers]
    pool = empty(1, RecordLayout.of(CONFIG).slot_bytes, dtype=torch.uint8)
    step = DecodeStep(model, weights, tensors, Buffers(model, 1, extent), pool, control, extent)
    step.forward()
    step.draw()
    return launched


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _model() -> Any:
    c = CONFIG
    vocabulary = empty(c.vocab_size, c.hidden_size, dtype=torch.bfloat16)
    head = SimpleNamespace(fn=empty(4, 4 * c.hidden_size), scale=empty(1), base=empty(4), norm=empty(c.hidden_size))
    head.vocabulary = vocabulary
    return SimpleNamespace(
        config=c, device=META, embedding=vocabulary, head=head, frequencies=lambda ratio: empty(c.qk_rope_head_dim // 2)
    )


def _weights(layer: int, guesses: bool) -> LayerWeights:
    c, ratio = CONFIG, CONFIG.compress_ratios[layer]
    d, width, heads = c.hidden_size, c.moe_intermediate_size, c.num_attention_heads * c.head_dim
    index = c.index_n_heads * c.index_head_dim if ratio == 4 else 0
    unquantised = {0: 1, 4: 4 * c.head_dim + 4 * c.index_head_dim + c.index_n_heads, 128: 2 * c.head_dim}[ratio]
    mixing = SimpleNamespace(fn=empty(24, 4 * d), scale=empty(3), base=empty(24))
    is_hash = c.is_hash_layer(layer)
    return LayerWeights(
        hc_attn=mixing,
        hc_ffn=mixing,
        attn_norm=empty(d),
        ffn_norm=empty(d),
        inputs8=_fp8(c.q_lora_rank + c.head_dim, d),
        inputs16=empty(unquantised, d, dtype=torch.bfloat16),
        q_norm=empty(c.q_lora_rank),
        kv_norm=empty(c.head_dim),
        pooling=Pooling(empty(c.head_dim), empty(max(ratio, 1), c.head_dim)),
        index_pooling=Pooling(empty(c.index_head_dim), empty(max(ratio, 1), c.index_head_dim)),
        wq_b=_fp8(heads + index, c.q_lora_rank),
        wo_a=_fp8(c.o_groups * c.o_lora_rank, heads // c.o_groups),
        wo_b=_fp8(d, c.o_groups * c.o_lora_rank),
        sink=empty(c.num_attention_heads),
        shared_w1_w3=_fp8(2 * width, d),
        shared_w2=_fp8(d, width),
        gates=empty((1 + guesses) * c.n_routed_experts, d, dtype=torch.bfloat16),
        bias=empty(c.n_routed_experts),
        tid2eid=empty(c.vocab_size if is_hash else 1, c.num_experts_per_tok, dtype=torch.int64),
    )


def _fp8(n: int, k: int) -> Fp8:
    return Fp8(empty(n, k, dtype=torch.uint8), empty(n // 128, k // 128, dtype=torch.uint8), 128)


def _tensors(layer: int, extent: Extent) -> LayerTensors:
    c, ratio = CONFIG, CONFIG.compress_ratios[layer]
    entries = extent.num_entries(ratio)
    keys = empty(1, c.sliding_window + entries, c.head_dim, dtype=torch.bfloat16)
    index_keys = empty(1, max(1, entries), c.index_head_dim, dtype=torch.bfloat16)
    return LayerTensors(keys, empty(1, 2, 8, 8), index_keys, empty(1, 2, 8, 8))
