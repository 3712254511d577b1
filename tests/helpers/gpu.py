"""Bytes to and from a GPU, by the driver alone; and how tests with one go on in another process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shared.cuda.driver import call
from shared.planning.gpu import find_gpu

ROOT = Path(__file__).resolve().parents[2]


def why_no_gpu() -> str | None:
    """What keeps this machine from running tests on a GPU; None if nothing does."""
    if find_gpu() is None:
        return "no NVIDIA GPU"
    if importlib.util.find_spec("cuda") is None:
        return "no package cuda-bindings (pip install 'icebox[cuda]')"
    return None


def read_gpu(address: int, nbytes: int) -> bytes:
    out = np.empty(nbytes, np.uint8)
    call("cuMemcpyDtoH", out.ctypes.data, address, nbytes)
    return out.tobytes()


def write_gpu(address: int, data: bytes) -> None:
    source = np.frombuffer(data, np.uint8)
    call("cuMemcpyHtoD", address, source.ctypes.data, len(data))


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another Python process with this code, which talks line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def eventually(holds: Callable[[], bool], what: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until it holds: the driver takes its time to clean up after a process."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)
