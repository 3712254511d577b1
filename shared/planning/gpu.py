"""An NVIDIA GPU of this machine, asked through the driver library and /proc; no GPU is an ordinary answer.

Owns the few driver calls (CUDA Driver API, `libcuda.so.1`). Deliberately not NVML or nvidia-smi: on machines whose GPU
shares the system's memory they answer "not supported" to questions about it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# CUdevice_attribute values from cuda.h.
_INTEGRATED, _CLOCK_KHZ, _BUS_BITS = 18, 36, 37
# Streaming kernels reach about this part of what clock and bus width allow.
_REACHABLE_BANDWIDTH = 0.88


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_free` of an integrated GPU is 0: it has none of its own. `bandwidth` in bytes a second, 0 if unknown."""

    name: str
    integrated: bool
    memory_total: int
    memory_free: int
    bandwidth: float
    held_by: tuple[int, ...] = ()


def find_gpu(ordinal: int = 0) -> Gpu | None:
    """The GPU that CUDA counts so, or None if there is no driver or no such device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if cuda.cuInit(0) != 0:
        return None
    device = ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) != 0:
        return None
    return _describe(cuda, device)


def _describe(cuda: ctypes.CDLL, device: ctypes.c_int) -> Gpu:
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    total = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    integrated = _attribute(cuda, device, _INTEGRATED) == 1
    # Two transfers a clock.
    peak = 2 * _attribute(cuda, device, _CLOCK_KHZ) * 1000 * _attribute(cuda, device, _BUS_BITS) / 8
    return Gpu(
        name=name.value.decode(errors="replace"),
        integrated=integrated,
        memory_total=total.value,
        memory_free=0 if integrated else _free_memory(cuda, device),
        bandwidth=peak * _REACHABLE_BANDWIDTH,
        held_by=tuple(holders()),
    )


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    ok = cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device) == 0
    return value.value if ok else 0


def _free_memory(cuda: ctypes.CDLL, device: ctypes.c_int) -> int:
    """Needs a context, which is made and dropped again."""
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != 0:
        return 0
    cuda.cuCtxPushCurrent_v2(context)
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    cuda.cuDevicePrimaryCtxRelease_v2(device)
    return free.value


def holders(proc: Path = Path("/proc")) -> Iterator[int]:
    """Ids of other processes, among those this user may look into, that have a GPU device file open."""
    for entry in proc.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and any(_gpu_files(entry / "fd")):
            yield int(entry.name)


def _gpu_files(directory: Path) -> Iterator[str]:
    try:
        links = list(directory.iterdir())
    except OSError:
        return
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("/dev/nvidia") and target.removeprefix("/dev/nvidia").isdigit():
            yield target
