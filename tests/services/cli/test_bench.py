"""`icebox bench decode`: its arithmetic, the config it derives, and what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands import icebox
from helpers.services import ROOT, write_config
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services.cli.bench import pool_bytes
from services.cli.bench_figures import Floor, Run, floor_of, fractions_table, percentile, phase, phases_table
from services.cli.bench_plot import draw
from services.cli.bench_services import derived, to_toml
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout
from shared.config import load_config
from shared.errors import ConfigError, ExitCode
from shared.planning.expectation import StepCost

DEMO = ROOT / "configs" / "demo.toml"
IDS = [7, 7, 8, 9]
TIMES = [100.0, 100.010, 100.020, 100.050]
BEFORE = {"uses": 100, "misses": 50, "wait_seconds": 1.0, "prefill_seconds": 1.0, "decode_seconds": 1.0}
AFTER = {
    "uses": 200,
    "misses": 60,
    "late_hits": 2,
    "bytes_read": 4000,
    "fetch_messages": 6,
    "hint_messages": 3,
    "wait_seconds": 1.01,
    "prefill_seconds": 1.01,
    "decode_seconds": 1.04,
}
GRAPH = {
    "graph_steps": 3,
    "graph_wait_seconds": 0.01,
    "graph_request_syncs": 5,
    "graph_step_syncs": 3,
    "graph_launches_per_step": 99,
    "graph_launches_per_layer": 15.5,
    "graph_most_launches_per_layer": 18,
}
FLOOR = Floor(3 * 10**9, 10**9, 4e12, "--ceiling")


def test_a_phase_is_what_the_counters_gained() -> None:
    result = phase("cold", IDS, TIMES, BEFORE, AFTER)
    assert (result.tokens, result.distinct_tokens) == (4, 3)
    assert result.tokens_per_s == pytest.approx(3 / 0.05)
    assert (result.median_ms, result.p95_ms, result.p99_ms) == pytest.approx((10, 30, 30))
    assert result.hit_rate == pytest.approx(0.88)
    assert (result.misses_per_step, result.late_hits_per_step, result.messages_per_step) == (2.5, 0.5, 1.5)
    assert (result.hints_per_step, result.bytes_per_step) == (0.75, 1000)
    assert result.wait_share == pytest.approx(0.2)
    assert (result.gpu_busy_share, result.host_syncs_per_step, result.launches_per_step) == (None, None, None)


def test_a_graph_waits_by_its_own_count() -> None:
    result = phase("warm", IDS, TIMES, BEFORE, AFTER | GRAPH)
    assert result.wait_share == pytest.approx(0.2)
    assert result.gpu_busy_share == pytest.approx(0.8)
    assert (result.launches_per_step, result.launches_per_layer, result.most_launches_per_layer) == (99, 15.5, 18)
    assert (result.host_syncs_per_step, result.host_syncs_per_request) == (0.75, 5)
    later = phase("warm", IDS, TIMES, AFTER | GRAPH, AFTER | GRAPH | {"uses": 300, "graph_wait_seconds": 0.02})
    assert (later.wait_share, later.hit_rate) == (pytest.approx(0.2), 1.0)
    assert (later.host_syncs_per_step, later.host_syncs_per_request) == (0, 0)


@pytest.mark.parametrize(
    ("values", "part", "expected"),
    [([5], 0.99, 5), ([1, 2], 0.5, 1), ([1, 2], 0.51, 2), (range(1, 101), 0.95, 95), (range(1, 101), 0.99, 99)],
)
def test_percentiles(values: list[float], part: float, expected: float) -> None:
    assert percentile(values, part) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_covers_its_part_and_no_smaller_value_does(values: list[float], part: float) -> None:
    found = percentile(values, part)
    assert sum(v <= found for v in values) >= part * len(values)
    assert sum(v < found for v in values) < part * len(values)


def test_the_floor() -> None:
    cost = StepCost(dense_bytes=3 * 10**9, record_bytes=10**8, uses=10, memory_bandwidth=0, disk_bandwidth=0)
    assert floor_of(cost, 4e12, "--ceiling") == FLOOR
    assert FLOOR.ms == 1.0
    assert floor_of(cost, 0.0, "unknown") is None


def shown(table: object) -> str:
    console = Console(width=200, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    with console.file:
        console.print(table)
    return console.export_text()


def a_run(counters: dict[str, float], slots: int = 60) -> Run:
    phases = [phase(name, IDS, TIMES, BEFORE, counters) for name in ("cold", "warm")]
    return Run(slots, 100, 1.0, tuple(phases), 512, 900.0)


def test_tables_show_what_there_is() -> None:
    on_cpu, on_gpu = (shown(phases_table(a_run(AFTER | more), FLOOR)) for more in ({}, GRAPH))
    for row in ("60 slots for 100 experts (60%)", "cold, 4 tokens", "88.0%", "10.00 x", "3 of 4"):
        assert row in on_cpu
        assert row in on_gpu
    assert "launches" not in on_cpu
    assert "GPU busy" not in on_cpu
    assert "launches a step" in on_gpu
    assert "15.5, at most 18" in on_gpu
    assert "0.750" in on_gpu
    assert "80.0%" in on_gpu
    assert "floor" not in shown(phases_table(a_run(AFTER), None))
    by_size = shown(fractions_table([a_run(AFTER, 100), a_run(AFTER)], None))
    assert by_size.splitlines()[2].replace("┃", "").split() == ["100%", "60%"]


def test_a_picture(tmp_path: Path) -> None:
    draw(tmp_path / "out.png", [a_run(AFTER), a_run(AFTER, 100)], FLOOR)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_no_picture_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = icebox(capsys, "bench", "decode", DEMO, "--plot", "x.png")
    assert (code, err) == (ExitCode.CONFIG, "icebox: --plot needs matplotlib: pip install 'icebox[plots]'\n")


@pytest.mark.parametrize("size", ["1 MiB", "auto"])
def test_the_derived_config_is_read_again(tmp_path: Path, size: str) -> None:
    plain = load_config(write_config(tmp_path / "source.toml", tmp_path, cache={"bytes": size}))
    model = replace(plain.model, path=tmp_path / 'a "quoted" ü \\ name')
    config = replace(plain, model=model, front=replace(plain.front, api_key="k'\"\\"))
    path = tmp_path / "again.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path) == replace(config, source=path)


def test_what_is_derived(tmp_path: Path) -> None:
    config = derived(load_config(DEMO), tmp_path, 12345)
    assert (config.run_dir, config.cache.bytes, config.cache.save_heat) == (tmp_path, 12345, False)
    assert (config.worker.session_bytes, config.worker.session_dir) == (0, None)
    assert config.model == load_config(DEMO).model


def test_a_pool_by_its_part_of_the_experts() -> None:
    model = ModelConfig.from_dir(ROOT / "demo" / "checkpoint")
    slot, experts = RecordLayout.of(model).slot_bytes, model.num_hidden_layers * model.n_routed_experts
    assert pool_bytes(1.0, model) == experts * slot
    assert pool_bytes(0.5, model) == math.ceil(experts / 2) * slot
    for part in (0.0, 1.01, -1.0, 0.001, math.nan):
        with pytest.raises(ConfigError, match=r"--cache .*: must be 0\.[0-9]+ to 1"):
            pool_bytes(part, model)


def test_a_load_that_the_context_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = icebox(capsys, "bench", "decode", DEMO, "--tokens", 4096)
    assert code == ExitCode.CONFIG
    assert "model.max_context = 4096 is too little for 4097 tokens" in err


def test_results_that_could_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, path in (("--json", tmp_path / "none" / "out.json"), ("--plot", tmp_path)):
        code, _, err = icebox(capsys, "bench", "decode", DEMO, option, path)
        assert code == ExitCode.CONFIG
        assert f"{path}: cannot be written" in err


@pytest.mark.parametrize("option", ["--ceiling", "--temperature"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_numbers_that_nothing_can_be_measured_with(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    code, _, err = icebox(capsys, "bench", "decode", DEMO, option, value)
    assert (code, f"Invalid value for '{option}'" in err) == (ExitCode.USAGE, True)


@pytest.mark.system
def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--tokens", 5, "--prompt", 16, "--cache", 0.4, "--ceiling", 0.01, "--json", out]
    code, text, _ = icebox(capsys, "bench", "decode", DEMO, *options)
    assert code == 0
    assert "cold, 5 tokens" in text
    assert "Floor: " in text
    report = json.loads(out.read_text())
    (run,) = report["runs"]
    cold, warm = run["phases"]
    assert (cold["name"], warm["name"], len(cold["steps_ms"]), len(warm["steps_ms"])) == ("cold", "warm", 4, 4)
    assert run["cached"] == pytest.approx(0.4, abs=0.01)
    assert cold["misses_per_step"] > 0
    assert 0 < cold["hit_rate"] < 1
    assert cold["bytes_per_step"] > 0
    assert warm["tokens_per_s"] > 0
    assert run["prefill_tokens_per_s"] > 0
    assert report["floor"]["ms"] > 0
    assert warm["over_floor"] == pytest.approx(warm["median_ms"] / report["floor"]["ms"])
    assert cold["launches_per_step"] is None


@pytest.mark.system
def test_a_service_that_cannot_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_bytes((ROOT / "demo" / "checkpoint" / "config.json").read_bytes())
    config = write_config(tmp_path / "icebox.toml", checkpoint)
    code, _, err = icebox(capsys, "bench", "decode", config, "--tokens", 5, "--prompt", 16)
    assert code == ExitCode.PEER_LOST
    assert "ended with exit code 78 before it was ready" in err
    assert "is it a checkpoint?" in err


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_it_ends_its_services_end(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "services.cli", "bench", "decode", str(DEMO), "--tokens", "4000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-3, stderr=-3) as process:
        until(lambda: len(services_in(tmp_path)) == 2)
        process.send_signal(number)
        process.wait(30)
    until(lambda: not services_in(tmp_path))


def services_in(directory: Path) -> list[str]:
    """Command lines of live processes that were given a config in this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if f"{directory}/icebox-bench-" in line:
            found.append(line)
    return found


def until(condition: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
