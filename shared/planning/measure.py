"""Quick measurements of this machine: how fast its disk and its memory read. About a second each, at most.

Owns the measuring only; what the numbers are good for is decided elsewhere.
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.checkpoint.direct_file import SECTOR_BYTES, open_direct
from shared.memory.io_buffer import io_buffer

# The size of one expert record of the real model, to a MiB: what the reads will look like.
READ_BYTES = 12 << 20
READERS = 8
_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second of `READERS` threads reading at random places of one file; `direct` says whether with O_DIRECT."""

    bytes_per_s: float
    direct: bool


def disk_speed(path: Path, seconds: float = 1.0) -> DiskSpeed | None:
    """Read the largest safetensors file in (or at) `path` for a while; None if there is none that can be read."""
    try:
        file = _largest_file(path)
        if file is None:
            return None
        fd, direct = open_direct(file, os.O_RDONLY)
    except OSError:
        return None
    try:
        size, deadline = os.fstat(fd).st_size, time.monotonic() + seconds
        started = time.monotonic()
        with ThreadPoolExecutor(READERS) as pool:
            read = sum(pool.map(lambda seed: _read_until(fd, size, deadline, seed), range(READERS)))
        return DiskSpeed(read / (time.monotonic() - started), direct)
    except OSError:
        return None
    finally:
        os.close(fd)


def memory_speed() -> float:
    """Bytes a second that one thread streams through, the best of three."""
    data, best = np.ones(_MEMORY_BYTES // 8, dtype=np.uint64), 0.0
    for _ in range(3):
        started = time.perf_counter()
        np.add.reduce(data)
        best = max(best, _MEMORY_BYTES / (time.perf_counter() - started))
    return best


def _largest_file(path: Path) -> Path | None:
    files = [path] if path.is_file() else list(path.glob("*.safetensors")) if path.is_dir() else []
    readable = [file for file in files if file.is_file()]
    return max(readable, key=lambda file: file.stat().st_size, default=None)


def _read_until(fd: int, size: int, deadline: float, seed: int) -> int:
    rng, done = random.Random(seed), 0
    sectors = max(1, (size - READ_BYTES) // SECTOR_BYTES)
    buffer = io_buffer(READ_BYTES)
    while time.monotonic() < deadline:
        count = os.preadv(fd, [buffer], rng.randrange(sectors) * SECTOR_BYTES)
        if count == 0:
            break
        done += count
    return done
