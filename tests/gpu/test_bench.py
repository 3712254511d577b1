"""What `icebox bench decode` knows only of a GPU: launches, and the graph's own waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.icebox import icebox
from helpers.services import ROOT, write_config

pytestmark = pytest.mark.timeout(600)  # compilers, where nothing is compiled yet


def test_the_graph_is_counted(tmp_path: Path) -> None:
    demo = ROOT / "demo" / "checkpoint"
    config = write_config(tmp_path / "icebox.toml", demo, worker={"device": "cuda"}, model={"max_context": 512})
    out = tmp_path / "out.json"
    options = ["--tokens", "100", "--prompt", "64", "--cache", "0.4", "--temperature", "1", "--ceiling", "4"]
    done = icebox("bench", "decode", str(config), *options, "--json", str(out), timeout_s=500.0)
    assert done.returncode == 0, done.stderr
    assert "GPU busy" in done.stdout
    report = json.loads(out.read_text())
    (run,), floor_ms = report["runs"], report["floor"]["ms"]
    cold, warm = run["phases"]
    assert cold["host_syncs_per_step"] > 0, "the graphs are captured in it"
    assert warm["host_syncs_per_step"] == 0
    for phase in run["phases"]:
        assert phase["launches_per_step"] > 7 * phase["launches_per_layer"]
        assert phase["launches_per_layer"] <= phase["most_launches_per_layer"] <= 16
        assert phase["host_syncs_per_request"] > 0
        assert 0 < phase["wait_share"] < 1
        assert phase["gpu_busy_share"] == pytest.approx(1 - phase["wait_share"])
        assert phase["misses_per_step"] > 0
        assert phase["over_floor"] == pytest.approx(phase["median_ms"] / floor_ms)
