"""A sequence's state: what it costs, what a reset forgets, and a context used to its last token."""

from __future__ import annotations

import pytest
import torch
from helpers import goldens

from services.worker.model import SequenceState
from services.worker.model.state import CompressorState

HEAD_DIM, INDEX_DIM, WINDOW = 128, 64, 32


def test_bytes_follow_the_context() -> None:
    """Ring, an entry per group, an index entry per group of 4, and the tokens that wait, twice with overlap."""
    config, context = goldens.shared("exact").model.config, 1000
    state = SequenceState.of(config, context)
    per_ratio = {
        0: WINDOW * HEAD_DIM,
        4: (WINDOW + 250) * HEAD_DIM + 250 * INDEX_DIM + 2 * 8 * 2 * (HEAD_DIM + INDEX_DIM),
        128: (WINDOW + 7) * HEAD_DIM + 2 * 128 * HEAD_DIM,
    }
    assert state.nbytes == 4 * sum(per_ratio[ratio] for ratio in config.compress_ratios)


@pytest.mark.parametrize("ratio", [4, 128])
def test_groups_that_do_not_exist_weigh_nothing(ratio: int) -> None:
    state = CompressorState(ratio, 16)
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
