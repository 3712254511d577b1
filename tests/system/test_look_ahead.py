"""Guesses of the trained demo's routers spare it misses, and are made only if the config says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.look_ahead import decode

pytestmark = pytest.mark.system


def test_guesses_spare_misses_and_change_no_word(tmp_path: Path) -> None:
    ids, with_guesses = decode(tmp_path / "with", look_ahead=True)
    same, without = decode(tmp_path / "without", look_ahead=False)
    assert ids == same
    assert (without["guessed"], without["guessed_right"]) == (0, 0)
    assert with_guesses["guessed"] > 100
    assert with_guesses["guessed_right"] > 0.4 * with_guesses["guessed"]
    assert with_guesses["hint_messages"] > without["hint_messages"] > 0
    assert with_guesses["misses"] < 0.8 * without["misses"]
