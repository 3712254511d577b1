"""Guesses inside the decode graph are as good as the CPU's, counted alike, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.look_ahead import with_and_without

pytestmark = pytest.mark.timeout(600)  # compilers, where nothing is compiled yet


def test_guesses_are_counted_and_change_no_word(tmp_path: Path) -> None:
    """How many misses they spare is the machine's business: here a step is over sooner than a read."""
    with_guesses, without = with_and_without(tmp_path, device="cuda")
    print(
        {name: (with_guesses[name], without[name]) for name in ("misses", "late_hits", "prefetched", "hint_messages")}
    )
