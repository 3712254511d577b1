"""What must change nothing: how a prompt is cut (to rounding), and caches, waves and order of arrival (to the bit)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
from helpers import goldens
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.local_experts import LocalExperts
from services.worker.model import moe
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import RecordLayout

PROMPT = 150


def _forward(setup: goldens.Setup, chunks: Sequence[int]) -> torch.Tensor:
    """Logits after the prompt in these chunks, and after each of two tokens more."""
    state, position, rows = setup.new_state(), 0, []
    for length in [*chunks, 1, 1]:
        rows.append(setup.model.forward(state, goldens.token_ids()[position : position + length], setup.experts))
        position += length
    return torch.stack(rows[-3:])


@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, PROMPT - 1), max_size=5))
def test_any_cut_of_a_prompt_gives_the_same_logits(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), PROMPT]
    chunks = [end - begin for begin, end in itertools.pairwise(edges)]
    assert (_forward(goldens.shared("exact"), chunks) - _uncut()).abs().max() < 1e-4


@functools.cache
def _uncut() -> torch.Tensor:
    return _forward(goldens.shared("exact"), [PROMPT])


def _with_cache(records: int) -> goldens.Setup:
    """The shared quantised model on an empty cache of `records`."""
    model = goldens.shared("quantised").model
    slot = RecordLayout.of(model.config).slot_bytes
    return goldens.Setup(model, LocalExperts(TensorIndex.open(goldens.TINY_A), model.config, records * slot))


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    return _forward(_with_cache(1000), [100, 50])


@pytest.mark.parametrize("records", [0, 5, 7, 16, 60])
def test_cache_size_and_its_waves_change_no_bit(records: int, reference: torch.Tensor) -> None:
    assert _forward(_with_cache(records), [100, 50]).equal(reference)


@pytest.mark.parametrize("wave", [1, 2, 3, 5, 16])
def test_wave_size_changes_no_bit(wave: int, reference: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "WAVE", wave)
    setup = _with_cache(1000)
    assert _forward(setup, [100, 50]).equal(reference)
    assert _forward(setup, [100, 50]).equal(reference), "the same experts, now all resident"


def test_a_run_repeats_to_the_bit(reference: torch.Tensor) -> None:
    setup = _with_cache(10)
    assert _forward(setup, [100, 50]).equal(reference)
    assert _forward(setup, [100, 50]).equal(reference)
