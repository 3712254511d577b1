"""How a record gets from the disk into its slot: straight, or by way of host memory if the slot is a GPU's.

Each reader thread has a landing of its own, so one thread's copy runs under the reads of the others.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.memory.host import HostSlab
from shared.memory.slab import Slab

Bytes = npt.NDArray[np.uint8]


class Landing(Protocol):
    """One thread's way into the slots, for one record after another."""

    def memory(self, slot: int) -> Bytes:
        """Where to read the record for this slot: uint8 [slot_bytes], page-aligned, the caller's until `land`."""

    def land(self, slot: int) -> None:
        """Returns when the slot was seen to hold what `memory` holds: from then on it may be published.

        Raises:
            DeviceError: it does not. If `is_alive` says no then, nothing will ever land again in this process.
        """

    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


class HostLanding:
    """Reads go into the slot itself."""

    def __init__(self, slab: HostSlab, slot_bytes: int) -> None:
        self._slots = slab.view().reshape(-1, slot_bytes)

    def memory(self, slot: int) -> Bytes:
        slot_memory: Bytes = self._slots[slot]
        return slot_memory

    def land(self, slot: int) -> None:
        """The bytes are there."""

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
