"""Guesses of the trained demo's routers spare it misses, and are made only if the config says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.look_ahead import with_and_without

pytestmark = pytest.mark.system


def test_guesses_spare_misses_and_change_no_word(tmp_path: Path) -> None:
    with_guesses, without = with_and_without(tmp_path, least=100)
    assert with_guesses["misses"] < 0.8 * without["misses"]
