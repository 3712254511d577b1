"""Slabs in host memory: an anonymous memory file (memfd_create(2)) that peers open through /proc/<pid>/fd.

It never has a name, so nothing can be left in /dev/shm, however a process dies: the kernel frees it with the last
mapping. A peer's mapping outlives the owner.
"""

from __future__ import annotations

import mmap
import os

import msgpack
import numpy as np
import numpy.typing as npt

from shared.errors import CapacityError


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
        """Allocate zeroed memory now, so that a lack of it is an error here and not a SIGBUS later."""
        descriptor = os.memfd_create("icebox-slab", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(descriptor, nbytes, os.getpid(), descriptor)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise CapacityError(f"cannot allocate {nbytes:,} bytes of memory for the pool ({error})") from error

    @classmethod
    def open(cls, pid: int, owner_descriptor: int, nbytes: int) -> HostSlab:
        """Map the memory file of process `pid`. Raises CapacityError if it is gone or not ours to open."""
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

    def handle(self) -> bytes:
        handle: bytes = msgpack.packb([self.KIND, *self._owner, self._nbytes])
        return handle

    def view(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            try:
                self._map.close()
            except BufferError:
                # A view is still referenced, say by a traceback; the mapping goes with the last one.
                pass
