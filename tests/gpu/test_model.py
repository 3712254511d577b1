"""The model on a GPU against the recorded vectors, with the checks and the limits of the CPU's tests."""

from __future__ import annotations

import pytest
import torch
from helpers import goldens

CUDA = torch.device("cuda")


def exact() -> goldens.Setup:
    return goldens.shared("exact", CUDA)


def quantised() -> goldens.Setup:
    return goldens.shared("quantised", CUDA)


# --- structure ---


@pytest.mark.parametrize(("prefill", "decode"), goldens.cases("structure-golden"))
def test_logits(prefill: int, decode: int) -> None:
    goldens.check_structure_case(exact(), prefill, decode)


@pytest.mark.parametrize(("prefill", "decode"), [c for c in goldens.cases("structure-golden") if c[0] <= 33])
def test_logits_where_a_longer_sequence_was(prefill: int, decode: int) -> None:
    goldens.check_structure_after_longer(exact(), prefill, decode)


@pytest.mark.parametrize("name", ["chunks_a", "chunks_b", "chunks_c"])
def test_chunked_prefill(name: str) -> None:
    goldens.check_structure_chunks(exact(), name)


def test_streams_after_every_layer() -> None:
    goldens.check_structure_hidden(exact())


def test_routes() -> None:
    goldens.check_structure_router(exact())


@pytest.mark.parametrize("prompt", [8, 150])
def test_greedy(prompt: int) -> None:
    goldens.check_structure_greedy(exact(), prompt)


def test_mtp() -> None:
    goldens.check_structure_mtp(exact())


def test_swiglu_limit_that_acts() -> None:
    goldens.check_structure_swiglu(goldens.shared("swiglu0.5", CUDA))


# --- quantised half layers ---


@pytest.mark.parametrize("layer", range(6))
def test_attention_half(layer: int) -> None:
    goldens.check_attention_half(quantised(), layer)


@pytest.mark.parametrize("layer", range(6))
def test_expert_half(layer: int) -> None:
    goldens.check_expert_half(quantised(), layer)


@pytest.mark.parametrize("layer", range(6))
def test_router(layer: int) -> None:
    goldens.check_router(quantised(), layer)


def test_head() -> None:
    goldens.check_head(quantised())


def test_mtp_block() -> None:
    goldens.check_mtp_block(quantised())


# --- end to end ---


def test_all_runs_pooled() -> None:
    goldens.check_end_to_end(quantised())


def test_mtp_end_to_end() -> None:
    goldens.check_end_to_end_mtp(quantised())


@pytest.mark.parametrize(("prefill", "decode"), [(1, 8), (3, 8), (129, 8)])
def test_a_used_state_changes_no_bit(prefill: int, decode: int) -> None:
    fresh = goldens.run_case(quantised(), prefill, decode)
    assert goldens.run_case(quantised(), prefill, decode, goldens.used_state(quantised())).equal(fresh)


def test_a_segment_put_back_changes_no_bit() -> None:
    """Out to the host and back into another state, between prefill and decode."""
    setup, ids = quantised(), goldens.token_ids()
    state, other = setup.new_state(), setup.new_state()
    setup.model.forward(state, ids[:150], setup.experts)
    other.restore([state.export(0)])
    for token in ids[150:154]:
        rows = [setup.model.forward(s, [token], setup.experts) for s in (state, other)]
        assert rows[0].equal(rows[1])


def test_memory_holds_the_weights_once() -> None:
    """FP8 stays FP8: what the model takes is about what its dense tensors take in the file, routed experts aside."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    setup = goldens.load(exact=False, device=CUDA)
    taken = torch.cuda.memory_allocated() - before
    from shared.checkpoint.index import TensorIndex

    dense = [t for name, t in TensorIndex.open(goldens.TINY_A).tensors.items() if ".experts." not in name]
    rotations = 2 * goldens.MAX_CONTEXT * setup.model.config.qk_rope_head_dim // 2 * 8
    allowed = 2 * sum(t.nbytes for t in dense) + rotations
    assert taken <= allowed, f"{taken} bytes of GPU memory for weights of {sum(t.nbytes for t in dense)}"
