"""Guesses inside the decode graph are as good as the CPU's, counted alike, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.look_ahead import with_and_without

pytestmark = pytest.mark.timeout(600)  # compilers, where nothing is compiled yet


def test_guesses_are_counted_and_change_no_word(tmp_path: Path) -> None:
    """How many there are and what they spare is the machine's business: a layer may be over sooner than a read, and
    then they end with the first try."""
    with_guesses, without = with_and_without(tmp_path, least=10, device="cuda")
    print(
        {name: (with_guesses[name], without[name]) for name in ("misses", "late_hits", "prefetched", "hint_messages")}
    )
