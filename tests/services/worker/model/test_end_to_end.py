"""The quantised model against whole recorded runs: coarse, since one flipped code moves the logits by 10 %."""

from __future__ import annotations

import pytest
from helpers import goldens


def test_all_runs_pooled() -> None:
    goldens.check_end_to_end(goldens.shared("quantised"))


def test_mtp() -> None:
    goldens.check_end_to_end_mtp(goldens.shared("quantised"))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 8), (3, 8), (129, 8)])
def test_a_used_state_changes_no_bit(prefill: int, decode: int) -> None:
    setup = goldens.shared("quantised")
    fresh = goldens.run_case(setup, prefill, decode)
    assert goldens.run_case(setup, prefill, decode, goldens.used_state(setup)).equal(fresh)
