"""Decoding goes on through cancels, a broken file and a kill; `tests/gpu/test_endurance.py` is the long form."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.endurance import Plan, endure
from helpers.services import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
TINY = ROOT / "tests" / "golden" / "tiny-a"


def test_whatever_happens_answers_are_the_same_and_nothing_grows(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    endure(tmp_path, checkpoint, Plan(tokens=100, longest=12, kills=[["expertd"]]))
