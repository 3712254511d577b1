"""A slab is one big stretch of memory that several processes map; this is the interface and the choice of its kind.

The owner creates it and hands out an opaque handle; a peer opens the handle once. Slots are the caller's arithmetic.
"""

from __future__ import annotations

from typing import Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from shared.errors import CapacityError, ProtocolError
from shared.memory.host import HostSlab

Bytes = npt.NDArray[np.uint8]


class Slab(Protocol):
    """Memory shared between processes."""

    @property
    def nbytes(self) -> int: ...

    def handle(self) -> bytes:
        """What a peer needs to open it, for as long as the owner lives."""

    def view(self) -> Bytes:
        """The memory, writable, uint8 [nbytes]. Views must be dropped before `close`."""

    def close(self) -> None:
        """Unmap. The memory is freed once every process has unmapped it. Idempotent."""


def create_slab(nbytes: int, device: str) -> Slab:
    """Allocate a slab where `device` ("cpu") computes.

    Raises:
        CapacityError: the memory is not there, or this build has no slabs for the device.
    """
    if device != "cpu":
        raise CapacityError(f'no slabs in {device} memory in this version; set worker.device = "cpu"')
    return HostSlab.create(nbytes)


def open_slab(handle: bytes) -> Slab:
    """Map a slab of another process.

    Raises:
        ProtocolError: not a handle of ours.
        CapacityError: the owner is gone, or it cannot be mapped.
    """
    try:
        kind, *fields = msgpack.unpackb(handle)
    except Exception as error:  # msgpack raises a dozen types for a dozen kinds of garbage
        raise ProtocolError(f"not a slab handle: {error}") from error
    if kind != HostSlab.KIND:
        raise ProtocolError(f"slab handle of unknown kind {kind!r}")
    match fields:
        case [int(pid), int(descriptor), int(nbytes)] if pid > 0 and descriptor >= 0 and nbytes > 0:
            return HostSlab.open(pid, descriptor, nbytes)
    raise ProtocolError(f"slab handle with fields {fields!r}")
