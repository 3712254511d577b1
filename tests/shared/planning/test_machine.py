"""Facts about machines: read from /proc and control groups, measured, or described in TOML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.checkpoints import tiny_checkpoint

from shared.errors import ConfigError
from shared.planning.gpu import holders
from shared.planning.machine import available_memory, load_machine, probe, read_meminfo
from shared.planning.measure import disk_speed, memory_speed

MACHINES = Path(__file__).parents[3] / "configs" / "machines"
MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    600 kB\nHugePages_Total:       3\nSwapTotal: 0 kB\n"
GOOD = (MACHINES / "spark.toml").read_text()


def test_meminfo() -> None:
    assert read_meminfo(MEMINFO) == {
        "MemTotal": 1_024_000,
        "MemAvailable": 614_400,
        "HugePages_Total": 3,
        "SwapTotal": 0,
    }


@pytest.mark.parametrize(
    ("limit", "current", "available"),
    [
        ("max", "5", 614_400),
        ("900000", "800000", 100_000),
        ("9000000", "0", 614_400),
        ("10", "50", 0),
        (None, None, 614_400),
    ],
)
def test_a_control_groups_limit_counts(tmp_path: Path, limit: str | None, current: str | None, available: int) -> None:
    if limit is not None and current is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{current}\n")
    assert available_memory(read_meminfo(MEMINFO), tmp_path) == available


def test_this_machine() -> None:
    machine = probe(tiny_checkpoint())
    assert 0 < machine.memory_available <= machine.memory_total
    assert machine.cpus >= 1
    assert machine.disk_free > 0
    assert machine.disk_speed > 1e6
    assert machine.memory_speed > 1e8


def test_a_path_that_cannot_be_looked_at(tmp_path: Path) -> None:
    machine = probe(tmp_path / ("x" * 300))
    assert (machine.disk_speed, machine.disk_free > 0) == (0, True)


def test_speeds_are_unknown_when_not_asked_for(tmp_path: Path) -> None:
    machine = probe(tmp_path / "not" / "there", speeds=False)
    assert (machine.disk_speed, machine.memory_speed) == (0, 0)
    assert machine.disk_free > 0


def test_disk_speed_of_nothing(tmp_path: Path) -> None:
    assert disk_speed(tmp_path) is None
    (tmp_path / "empty.safetensors").touch()
    speed = disk_speed(tmp_path, 0.05)
    assert speed is None or speed.bytes_per_s == 0


def test_memory_speed_is_of_this_world() -> None:
    assert 1e8 < memory_speed() < 1e13


def test_who_holds_the_gpu(tmp_path: Path) -> None:
    own = os.getpid()
    targets = {own + 1: "/dev/nvidia0", own + 2: "/dev/null", own + 3: "/dev/nvidiactl", own: "/dev/nvidia0"}
    for pid, target in targets.items():
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(target)
    (tmp_path / f"{own + 4}").mkdir()
    (tmp_path / "meminfo").touch()
    assert list(holders(tmp_path)) == [own + 1]


@pytest.mark.parametrize("name", ["spark", "h200"])
def test_the_described_machines_load(name: str) -> None:
    machine = load_machine(MACHINES / f"{name}.toml")
    assert machine.gpu is not None
    assert machine.gpu.integrated == (name == "spark")
    assert machine.memory_total >= 125 * 10**9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cpus = 20", "", "missing key 'cpus'"),
        ("cpus = 20", "cpus = 0", "'cpus' must be a whole number above 0, not 0"),
        ("cpus = 20", "cpus = 20\ncores = 3", "unknown key 'cores'"),
        ('memory_total = "128 GB"\nm', 'memory_total = "128 GBs"\nm', "'memory_total' must be a size such as"),
        ("integrated = true ", "integrated = 1 ", "'gpu.integrated' must be true or false, not 1"),
        ("memory_free = 0", "memory_free = -1", "'gpu.memory_free' must be a size"),
        ("memory_free = 0", "memory_free = 0\nvram = 3", "unknown key 'gpu.vram'"),
        ('name = "NVIDIA DGX Spark"', "name = 3", "'name' must be text in quotes, not 3"),
        ("[gpu]", "[gpu", "not valid TOML"),
        ("cpus = 20", f"cpus = {10**400}", "'cpus' has more than the 64 bits"),
        ('disk_speed = "9.7 GB"', f"disk_speed = '{10**30} GB'", "'disk_speed' must be a size"),
        ("cpus = 20", "cpus = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_a_wrong_description_names_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    path = tmp_path / "machine.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=f"machine.toml.*{message}"):
        load_machine(path)


def test_a_missing_description(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read this machine file"):
        load_machine(tmp_path / "none.toml")


def test_a_gpu_that_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(GOOD.split("[gpu]")[0] + "gpu = 3\n")
    with pytest.raises(ConfigError, match="'gpu' must be a table"):
        load_machine(path)


def test_planning_imports_no_torch() -> None:
    code = "import sys, shared.planning.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
