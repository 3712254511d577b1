"""The model without simulated quantisation against recorded vectors: every path of prefill, decode and chunks."""

from __future__ import annotations

import pytest
from helpers import goldens

EXACT = "exact"


@pytest.mark.parametrize(("prefill", "decode"), goldens.cases("structure-golden"))
def test_logits(prefill: int, decode: int) -> None:
    goldens.check_structure_case(goldens.shared(EXACT), prefill, decode)


SHORT_CASES = [case for case in goldens.cases("structure-golden") if case[0] <= 33]


@pytest.mark.parametrize(("prefill", "decode"), SHORT_CASES)
def test_logits_where_a_longer_sequence_was(prefill: int, decode: int) -> None:
    goldens.check_structure_after_longer(goldens.shared(EXACT), prefill, decode)


@pytest.mark.parametrize("name", ["chunks_a", "chunks_b", "chunks_c"])
def test_chunked_prefill(name: str) -> None:
    goldens.check_structure_chunks(goldens.shared(EXACT), name)


def test_streams_after_every_layer() -> None:
    goldens.check_structure_hidden(goldens.shared(EXACT))


def test_router() -> None:
    goldens.check_structure_router(goldens.shared(EXACT))


@pytest.mark.parametrize("prompt", [8, 150])
def test_greedy(prompt: int) -> None:
    goldens.check_structure_greedy(goldens.shared(EXACT), prompt)


def test_mtp() -> None:
    goldens.check_structure_mtp(goldens.shared(EXACT))


def test_swiglu_limit_that_acts() -> None:
    goldens.check_structure_swiglu(goldens.shared("swiglu0.5"))
