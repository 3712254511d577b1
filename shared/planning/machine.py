"""What a machine has: memory, swap, disk, GPU, limits. Probed here, or described in a TOML file.

Owns the facts, not what follows from them. A described machine lets a plan be made before the machine is bought.
"""

from __future__ import annotations

import os
import platform
import reprlib
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shared.config import parse_bytes, read_toml
from shared.errors import ConfigError
from shared.planning.gpu import Gpu, find_gpu
from shared.planning.measure import disk_speed, memory_speed


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes in bytes, speeds in bytes a second. 0 means unknown for speeds; `memlock` None means unlimited.

    `memory_speed` is what the CPU streams at; a GPU's own speed is with the GPU.
    """

    name: str
    cpus: int
    memory_total: int
    memory_available: int
    swap_total: int
    swap_used: int
    memory_speed: float
    disk_speed: float
    disk_direct: bool
    disk_free: int
    memlock: int | None
    gpu: Gpu | None


def probe(path: Path, speeds: bool = True, gpu: int = 0) -> Machine:
    """This machine; the disk is the one that holds `path` (a checkpoint, for its speed to be measured), the GPU the
    one of this number.

    Measuring the speeds takes about two seconds; without, they are unknown.
    """
    meminfo = read_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
    disk = disk_speed(path) if speeds else None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        name=platform.node() or "this machine",
        cpus=len(os.sched_getaffinity(0)),
        memory_total=meminfo["MemTotal"],
        memory_available=available_memory(meminfo),
        swap_total=meminfo["SwapTotal"],
        swap_used=meminfo["SwapTotal"] - meminfo["SwapFree"],
        memory_speed=memory_speed() if speeds else 0.0,
        disk_speed=disk.bytes_per_s if disk else 0.0,
        disk_direct=disk.direct if disk else False,
        disk_free=_free_space(path),
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        gpu=find_gpu(gpu),
    )


def read_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo (proc(5)) as bytes by name."""
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * (1024 if len(words) > 2 else 1) for words in lines if len(words) >= 2}


def available_memory(meminfo: dict[str, int], cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """MemAvailable, or what a memory limit of this control group leaves, whichever is less."""
    available = meminfo["MemAvailable"]
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def _free_space(path: Path) -> int:
    while not os.path.exists(path):  # False also for what may not be looked at, where Path.exists raises
        path = path.parent
    return shutil.disk_usage(path).free


def load_machine(path: Path) -> Machine:
    """A machine described in TOML; configs/machines/ holds examples.

    Raises:
        ConfigError: the file is missing or not TOML, or a key is unknown, missing or of the wrong kind.
    """
    table = read_toml(path, "machine")
    reader = _Table(path, table, "")
    gpu = table.pop("gpu", None)
    if gpu is not None and not isinstance(gpu, dict):
        raise ConfigError(f"{path}: 'gpu' must be a table, written [gpu]")
    machine = Machine(
        name=reader.text("name"),
        cpus=reader.whole("cpus"),
        memory_total=reader.size("memory_total"),
        memory_available=reader.size("memory_available"),
        swap_total=reader.size("swap_total"),
        swap_used=0,
        memory_speed=float(reader.size("memory_speed")),
        disk_speed=float(reader.size("disk_speed")),
        disk_direct=True,
        disk_free=reader.size("disk_free"),
        memlock=None,
        gpu=None if gpu is None else _read_gpu(_Table(path, gpu, "gpu.")),
    )
    reader.finish()
    return machine


def _read_gpu(reader: _Table) -> Gpu:
    gpu = Gpu(
        name=reader.text("name"),
        integrated=reader.flag("integrated"),
        memory_total=reader.size("memory_total"),
        memory_free=reader.size("memory_free"),
        bandwidth=float(reader.size("memory_speed")),
    )
    reader.finish()
    return gpu


class _Table:
    """Takes keys out of a TOML table one by one; what is left at the end is unknown."""

    def __init__(self, path: Path, table: dict[str, Any], prefix: str) -> None:
        self._path, self._left, self._prefix = path, table, prefix

    def text(self, key: str) -> str:
        value = self._take(key)
        return value if isinstance(value, str) else self._refuse(key, "text in quotes", value)

    def whole(self, key: str) -> int:
        value = self._take(key)
        return value if type(value) is int and value > 0 else self._refuse(key, "a whole number above 0", value)

    def flag(self, key: str) -> bool:
        value = self._take(key)
        return value if isinstance(value, bool) else self._refuse(key, "true or false", value)

    def size(self, key: str) -> int:
        value = self._take(key)
        number = value if type(value) is int else parse_bytes(value) if isinstance(value, str) else None
        if number is None or not 0 <= number < 2**63:
            self._refuse(key, 'a size such as "128 GB"', value)
        return number

    def finish(self) -> None:
        for key in self._left:
            raise ConfigError(f"{self._path}: unknown key '{self._prefix}{key}'")

    def _take(self, key: str) -> Any:
        if key not in self._left:
            raise ConfigError(f"{self._path}: missing key '{self._prefix}{key}'")
        return self._left.pop(key)

    def _refuse(self, key: str, what: str, value: object) -> NoReturn:
        raise ConfigError(f"{self._path}: '{self._prefix}{key}' must be {what}, not {reprlib.repr(value)}")
