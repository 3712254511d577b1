"""A sequence's state: what it costs, what a reset forgets, and a context used to its last token."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import goldens
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.model import SequenceState
from services.worker.model.state import CompressorState

HEAD_DIM, INDEX_DIM, WINDOW = 128, 64, 32


def test_bytes_follow_the_context() -> None:
    """Ring, an entry per group, an index entry per group of 4, and the tokens that wait, twice with overlap."""
    config, context = goldens.shared("exact").model.config, 1000
    state = SequenceState.of(config, context, torch.device("cpu"), torch.float32)
    per_ratio = {
        0: WINDOW * HEAD_DIM,
        4: (WINDOW + 250) * HEAD_DIM + 250 * INDEX_DIM + 2 * 8 * 2 * (HEAD_DIM + INDEX_DIM),
        128: (WINDOW + 7) * HEAD_DIM + 2 * 128 * HEAD_DIM,
    }
    assert state.nbytes == 4 * sum(per_ratio[ratio] for ratio in config.compress_ratios)


def test_keys_of_a_narrower_type_take_less() -> None:
    """What waits for its group to close stays float32."""
    config = goldens.shared("exact").model.config
    wide, narrow = (
        SequenceState.of(config, 1000, torch.device("cpu"), dtype).layers for dtype in (torch.float32, torch.bfloat16)
    )
    for a, b in zip(wide, narrow, strict=True):
        assert b.keys.nbytes * 2 == a.keys.nbytes
        assert b.compressor is None or b.compressor.rows.dtype == torch.float32


@pytest.mark.parametrize("ratio", [4, 128])
def test_groups_that_do_not_exist_weigh_nothing(ratio: int) -> None:
    state = CompressorState(ratio, 16, torch.device("cpu"))
    state.rows.fill_(3.0)
    state.reset()
    assert (state.rows[0] == 0).all()
    assert (state.rows[1] == -torch.inf).all()


def test_reset_forgets_both_positions() -> None:
    setup = goldens.shared("exact")
    state = setup.new_state()
    h = setup.model.hidden(state, [1, 2, 3], setup.experts)
    setup.model.draft(state, h, [2, 3, 4], setup.experts)
    assert (state.position, state.extra_position) == (3, 3)
    state.reset()
    assert (state.position, state.extra_position) == (0, 0)


@pytest.mark.parametrize("context", [1, 3, 4, 31, 127, 128, 129])
def test_a_context_can_be_filled_to_its_last_token(context: int) -> None:
    """Whatever its length: groups that never close need no room."""
    setup = goldens.shared("exact")
    small, ids = setup.model.new_state(context), goldens.token_ids()[:context]
    large = setup.new_state()
    expected = setup.model.forward(large, ids, setup.experts)
    if context > 1:
        setup.model.forward(small, ids[:-1], setup.experts)
    got = setup.model.forward(small, ids[-1:], setup.experts)
    assert (got - expected).abs().max() < goldens.limits("structure")["logits_max_abs_max"]


def test_sequences_do_not_touch_each_other() -> None:
    """Two at once on one model, in turns, as if each were alone."""
    setup, ids = goldens.shared("quantised"), goldens.token_ids()
    alone = [goldens.run_case(setup, 9, 3), _others_case(setup)]
    one, two = setup.new_state(), setup.new_state()
    rows: list[list[torch.Tensor]] = [[], []]
    rows[0].append(setup.model.forward(one, ids[:9], setup.experts))
    rows[1].append(setup.model.forward(two, ids[100:140], setup.experts))
    for i in range(3):
        rows[1].append(setup.model.forward(two, ids[140 + i : 141 + i], setup.experts))
        rows[0].append(setup.model.forward(one, ids[9 + i : 10 + i], setup.experts))
    assert torch.stack(rows[0]).equal(alone[0])
    assert torch.stack(rows[1]).equal(alone[1])


def _others_case(setup: goldens.Setup) -> torch.Tensor:
    ids, state = goldens.token_ids(), setup.new_state()
    rows = [setup.model.forward(state, ids[100:140], setup.experts)]
    rows += [setup.model.forward(state, [ids[140 + i]], setup.experts) for i in range(3)]
    return torch.stack(rows)


PROMPT, STEPS = 190, 3


def _dirty_state(setup: goldens.Setup) -> SequenceState:
    """What nobody wrote is no number, so that reading it would show."""
    state = setup.new_state()
    for layer in state.layers:
        tensors = [layer.keys, layer.index_keys, layer.compressor and layer.compressor.rows]
        for tensor in (*tensors, layer.index_compressor and layer.index_compressor.rows):
            if tensor is not None:
                tensor.fill_(torch.nan)
    return state


@settings(max_examples=6, deadline=None)
@given(cuts=st.sets(st.integers(1, PROMPT - 1), min_size=1, max_size=5), data=st.data())
def test_a_copy_continues_to_the_bit(cuts: set[int], data: st.DataObject) -> None:
    """Segments copied out of one sequence make another its equal, whichever of the cuts it begins from."""
    setup, ids = goldens.shared("quantised"), goldens.token_ids()
    edges = [0, *sorted(cuts), PROMPT]
    chosen = data.draw(st.integers(1, len(edges) - 2))
    state, path = setup.new_state(), []
    for begin, end in itertools.pairwise(edges[: chosen + 1]):
        setup.model.forward(state, ids[begin:end], setup.experts)
        path.append(state.export(begin))
    copy = _dirty_state(setup)
    copy.restore(path)
    assert copy.position == state.position == edges[chosen]
    rest = [*itertools.pairwise(edges[chosen:]), *((i, i + 1) for i in range(PROMPT, PROMPT + STEPS))]
    for begin, end in rest:
        expected = setup.model.forward(state, ids[begin:end], setup.experts)
        assert setup.model.forward(copy, ids[begin:end], setup.experts).equal(expected)


def test_a_copy_stays_what_it_was() -> None:
    setup, ids = goldens.shared("quantised"), goldens.token_ids()
    state = setup.new_state()
    setup.model.forward(state, ids[:50], setup.experts)
    kept = state.export(0)
    expected = setup.model.forward(state, ids[50:51], setup.experts)
    setup.model.forward(state, ids[100:200], setup.experts)
    state.restore([kept])
    assert setup.model.forward(state, ids[50:51], setup.experts).equal(expected)


def test_a_copy_covers_the_extra_block() -> None:
    setup, ids = goldens.shared("quantised"), goldens.token_ids()
    state, copy = setup.new_state(), _dirty_state(setup)
    setup.model.draft(state, setup.model.hidden(state, ids[:40], setup.experts), ids[1:41], setup.experts)
    copy.restore([state.export(0)])
    drafts = [
        setup.model.draft(s, setup.model.hidden(s, ids[40:41], setup.experts), ids[41:42], setup.experts)
        for s in (state, copy)
    ]
    assert drafts[0].equal(drafts[1])


def test_a_copy_costs_its_tokens_and_one_ring() -> None:
    """A second segment adds entries for its own tokens only."""
    setup, ids = goldens.shared("quantised"), goldens.token_ids()
    state = setup.new_state()
    setup.model.forward(state, ids[:128], setup.experts)
    setup.model.forward(state, ids[128:192], setup.experts)
    kept, ratios = state.export(128), setup.model.config.compress_ratios
    rows = {0: 0, 4: 16, 128: 0}
    assert sum(len(kept.appended[f"{i}.entries"]) for i, ratio in enumerate(ratios) if ratio) == sum(
        rows[ratio] for ratio in ratios
    )
    assert all(len(kept.passing[f"{i}.ring"]) == WINDOW for i in range(len(ratios)))


def test_restoring_nothing_is_a_reset() -> None:
    setup, ids = goldens.shared("quantised"), goldens.token_ids()
    expected = setup.model.forward(setup.new_state(), ids[:9], setup.experts)
    state = setup.new_state()
    setup.model.forward(state, ids[:150], setup.experts)
    state.restore([])
    assert setup.model.forward(state, ids[:9], setup.experts).equal(expected)
