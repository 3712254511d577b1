"""Ten thousand tokens of the demo in the smallest pool, through cancels, a broken file and kills."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.endurance import KILLS, POOL_GROWTH, Plan, endure
from helpers.gpu import eventually
from helpers.services import ROOT

from shared.cuda.device import Device

pytestmark = pytest.mark.timeout(900)  # compilers, where nothing is compiled yet
DEMO = ROOT / "demo" / "checkpoint"


def test_whatever_happens_answers_are_the_same_and_nothing_grows(tmp_path: Path, device: Device) -> None:
    before = device.memory().free
    plan = Plan(10_000, 200, KILLS, sections={"worker": {"device": "cuda"}}, free_bytes=lambda: device.memory().free)
    print(dict(endure(tmp_path, shutil.copytree(DEMO, tmp_path / "checkpoint"), plan)))
    eventually(
        lambda: before - device.memory().free < POOL_GROWTH,
        lambda: f"free before {before:,}, after {device.memory().free:,}",
    )
