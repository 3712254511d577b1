"""Guesses inside the decode graph are as good as the CPU's, counted alike, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.look_ahead import decode

pytestmark = pytest.mark.timeout(600)  # compilers, where nothing is compiled yet


def test_guesses_are_counted_and_change_no_word(tmp_path: Path) -> None:
    """How many misses they spare is the machine's business: here a step is over sooner than a read."""
    ids, with_guesses = decode(tmp_path / "with", look_ahead=True, device="cuda")
    same, without = decode(tmp_path / "without", look_ahead=False, device="cuda")
    print(
        {name: (with_guesses[name], without[name]) for name in ("misses", "late_hits", "prefetched", "hint_messages")}
    )
    assert ids == same
    assert (without["guessed"], without["guessed_right"]) == (0, 0)
    assert with_guesses["guessed"] > 100
    assert with_guesses["guessed_right"] > 0.4 * with_guesses["guessed"]
    assert with_guesses["hint_messages"] > without["hint_messages"] > 0
