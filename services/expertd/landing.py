"""How a record gets from the disk into its slot: straight, or by way of host memory if the slot is a GPU's.

Each record being read has its own Landing; its copies overlap with its own and other reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.memory.host import HostSlab
from shared.memory.io_buffer import io_buffer
from shared.memory.slab import Slab

Bytes = npt.NDArray[np.uint8]


class SlotWriter(Protocol):
    """One record on its way into one slot. Memory to read into is page-aligned, as O_DIRECT wants it."""

    def memory(self, target: int, nbytes: int) -> Bytes | None:
        """The slot itself from `target`, the start of a page, on; None if files cannot be read into it there."""

    def staging(self, nbytes: int) -> Bytes:
        """Somewhere else to read into, before its pieces are `put`; the same memory each time."""

    def put(self, target: int, piece: Bytes) -> None:
        """These bytes of `staging` belong at `target` of the slot. Raises DeviceError."""

    def crc32(self, nbytes: int) -> int:
        """Of the first bytes of the slot, all of which were read or put."""


class Landing(Protocol):
    """A way into the slots, for one record after another."""

    def enter_thread(self) -> None:
        """Once in each thread that lands anything. Raises DeviceError."""

    def into(self, slot: int) -> AbstractContextManager[SlotWriter]:
        """The slot is written inside the block, by nobody after it: whether or not reading failed, nothing is on the
        way any more. If the block ends well, all was seen to be in the slot, which may be published.

        Raises:
            DeviceError: it was not. If `is_alive` says no then, nothing will ever land again in this process.
        """

    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


class Staging:
    """A page-aligned buffer."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def buffer(self, nbytes: int) -> Bytes:
        """nbytes of it; contents are whatever was read before."""
        if len(self._memory) < nbytes:
            self._memory = np.frombuffer(io_buffer(nbytes), np.uint8)
        return self._memory[:nbytes]


class HostSlot:
    """A slot in host memory, uint8 [slot_bytes]: aligned reads go straight into it."""

    def __init__(self, slot: Bytes, staging: Staging) -> None:
        self._slot = slot
        self._staging = staging

    def memory(self, target: int, nbytes: int) -> Bytes | None:
        return self._slot[target : target + nbytes] if target + nbytes <= len(self._slot) else None

    def staging(self, nbytes: int) -> Bytes:
        return self._staging.buffer(nbytes)

    def put(self, target: int, piece: Bytes) -> None:
        self._slot[target : target + len(piece)] = piece

    def crc32(self, nbytes: int) -> int:
        return zlib.crc32(self._slot[:nbytes].data)


class HostLanding:
    """Slots in host memory: what is written is there."""

    def __init__(self, slab: HostSlab, slot_bytes: int) -> None:
        self._slots = slab.view().reshape(-1, slot_bytes)
        self._staging = Staging()

    def enter_thread(self) -> None:
        pass

    @contextmanager
    def into(self, slot: int) -> Iterator[SlotWriter]:
        yield HostSlot(self._slots[slot], self._staging)

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        self._slots = self._slots[:0]


def make_landing(slab: Slab, slot_bytes: int) -> Landing:
    """A landing for a slab of slots. Raises CapacityError if it needs host memory that is not to be had."""
    if isinstance(slab, HostSlab):
        return HostLanding(slab, slot_bytes)
    from services.expertd.landing_cuda import CudaLanding
    from shared.memory.cuda_slab import CudaSlab

    assert isinstance(slab, CudaSlab)
    return CudaLanding(slab, slot_bytes)
