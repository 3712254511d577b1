"""A slab is one big stretch of memory that two processes map; this is the interface and the choice of its kind.

The owner creates it and hands out an opaque handle; a peer opens the handle once. Slots are the caller's arithmetic.
"""

from __future__ import annotations

from typing import Protocol

from shared.memory.handle import unpack_handle
from shared.memory.host import HostSlab


class Slab(Protocol):
    """Memory shared between processes, where a device computes. `HostSlab.view` and `CudaSlab` say more of each."""

    @property
    def address(self) -> int:
        """Where it begins for this process: a host pointer or a device pointer, by the kind of slab."""

    @property
    def nbytes(self) -> int: ...

    def handle(self) -> bytes:
        """What a peer needs to open it, for as long as the owner lives."""

    def close(self) -> None:
        """Unmap. The memory is freed once every process has unmapped it. Idempotent."""


def create_slab(nbytes: int, device: str) -> Slab:
    """Allocate a slab where `device` ("cpu", "cuda" or "cuda:N") computes.

    Raises:
        CapacityError: the memory is not there, or the GPU cannot share it.
        ConfigError: there is no such GPU.
    """
    if device == "cpu":
        return HostSlab.create(nbytes)
    from shared.memory.cuda import create_cuda_slab

    return create_cuda_slab(nbytes, device)


def open_slab(handle: bytes, device: str) -> Slab:
    """Map a slab of another process, for computing on `device`.

    Raises:
        ProtocolError: not a handle of ours.
        CapacityError: the owner is gone, or it cannot be mapped.
        ConfigError: the slab is not where `device` computes.
    """
    kind, _ = unpack_handle(handle)
    if kind == HostSlab.KIND:
        return HostSlab.open(handle)
    from shared.memory.cuda import open_cuda_slab

    return open_cuda_slab(handle, device)
