"""Slabs in host memory: an anonymous memory file (memfd_create(2)) that peers open through /proc/<pid>/fd.

It never has a name, so nothing can be left in /dev/shm, however a process dies: the kernel frees it with the last
mapping. A peer's mapping outlives the owner.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.errors import CapacityError
from shared.memory.handle import foreign_handle, pack_handle, unpack_handle


class HostSlab:
    """One mapped memory file. The owner keeps its descriptor open, so that peers can find it."""

    KIND = "memfd"

    def __init__(self, descriptor: int, nbytes: int, owner_pid: int, owner_descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._nbytes = nbytes
        self._owner = (owner_pid, owner_descriptor)
        self._map = mmap.mmap(descriptor, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> HostSlab:
        """Allocate zeroed memory now, so that a lack of it is an error here and not a SIGBUS later.

        Raises:
            CapacityError: it is more than the machine has to give.
        """
        available = _available_bytes()
        if nbytes > available:
            # Nothing else would refuse it: the kernel hands out pages until it has to kill somebody.
            raise CapacityError(f"cannot allocate {nbytes:,} bytes of memory for the pool, {available:,} are available")
        descriptor = os.memfd_create("icebox-slab", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(descriptor, nbytes, os.getpid(), descriptor)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise CapacityError(f"cannot allocate {nbytes:,} bytes of memory for the pool ({error})") from error

    @classmethod
    def open(cls, handle: bytes) -> HostSlab:
        """Map the memory file of another process.

        Raises:
            ProtocolError: not a handle of such a file.
            CapacityError: it is gone, or not ours to open.
        """
        kind, fields = unpack_handle(handle)
        match fields:
            case [int(pid), int(descriptor), int(nbytes)] if pid > 0 and descriptor >= 0 and nbytes > 0:
                if kind == cls.KIND:
                    return cls._open(pid, descriptor, nbytes)
        raise foreign_handle(kind, fields)

    @classmethod
    def _open(cls, pid: int, owner_descriptor: int, nbytes: int) -> HostSlab:
        path = f"/proc/{pid}/fd/{owner_descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CapacityError(f"cannot open shared memory {path} ({error.strerror})") from error
        if os.fstat(descriptor).st_size != nbytes:
            os.close(descriptor)
            raise CapacityError(f"shared memory {path} is not the {nbytes:,} bytes it was said to be")
        return cls(descriptor, nbytes, pid, owner_descriptor)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def address(self) -> int:
        return int(self.view().ctypes.data)

    def handle(self) -> bytes:
        return pack_handle(self.KIND, *self._owner, self._nbytes)

    def view(self) -> npt.NDArray[np.uint8]:
        """The memory, writable, uint8 [nbytes]. Views should be dropped before `close`."""
        return np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            # A view may still be referenced, say by a traceback; then the mapping goes with the last one.
            with contextlib.suppress(BufferError):
                self._map.close()


def _available_bytes() -> int:
    """MemAvailable of proc(5): what can be had without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CapacityError("/proc/meminfo has no MemAvailable; Icebox needs Linux 3.14 or newer")
