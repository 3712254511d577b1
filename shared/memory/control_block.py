"""The page that expertd and the worker both see: slot table, clock, flags and use counts.

Each field has one writer and a cache line of its own, and every access is one aligned store or load, which is what the
slot protocol builds on. Knows nothing of that protocol.

Layout, little-endian, offsets in bytes: 0 magic, version, layers, experts (uint32 each) | 64 worker_clock (uint64) |
128 busy (uint32) | 192 abort (uint32) | 4096 slot_table int32 [layers, experts] | uses uint64 [layers, experts].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.errors import ProtocolError
from shared.memory.slab import Slab, create_slab, open_slab

MAGIC = 0x58424349  # "ICBX"
VERSION = 1
_HEADER = 16
_CLOCK, _BUSY, _ABORT, _TABLE = 64, 128, 192, 4096
_LINE = 64
NO_SLOT = -1


class ControlBlock:
    """One mapping of the control block; `slot_table` and `uses` are live views."""

    def __init__(self, slab: Slab, layers: int, experts: int) -> None:
        self._slab = slab
        memory = slab.view()
        cells = layers * experts
        uses_at = _aligned(_TABLE + 4 * cells)
        self._clock = memory[_CLOCK : _CLOCK + 8].view(np.uint64)
        self._busy = memory[_BUSY : _BUSY + 4].view(np.uint32)
        self._abort = memory[_ABORT : _ABORT + 4].view(np.uint32)
        self.slot_table: npt.NDArray[np.int32] = (
            memory[_TABLE : _TABLE + 4 * cells].view(np.int32).reshape(layers, experts)
        )
        self.uses: npt.NDArray[np.uint64] = (
            memory[uses_at : uses_at + 8 * cells].view(np.uint64).reshape(layers, experts)
        )

    @classmethod
    def create(cls, moe_layers: int, experts: int) -> ControlBlock:
        """A new one: nothing resident, clock 0, idle."""
        slab = create_slab(_block_bytes(moe_layers, experts), "cpu")
        slab.view()[:_HEADER].view(np.uint32)[:] = (MAGIC, VERSION, moe_layers, experts)
        block = cls(slab, moe_layers, experts)
        block.slot_table[:] = NO_SLOT
        return block

    @classmethod
    def open(cls, handle: bytes) -> ControlBlock:
        """Map another process's.

        Raises:
            ProtocolError: not a handle, or the memory is no control block of this version.
            CapacityError: the owner is gone.
        """
        slab = open_slab(handle)
        header = slab.view()[:_HEADER].tobytes().ljust(_HEADER, b"\0")
        magic, version, layers, experts = (int(word) for word in np.frombuffer(header, np.uint32))
        if (magic, version, slab.nbytes) != (MAGIC, VERSION, _block_bytes(layers, experts)):
            slab.close()
            raise ProtocolError(
                f"the shared memory is no control block of version {VERSION} (magic {magic:#x}, version {version}, "
                f"{layers} layers of {experts} experts in {slab.nbytes} bytes)"
            )
        return cls(slab, layers, experts)

    def handle(self) -> bytes:
        return self._slab.handle()

    @property
    def worker_clock(self) -> int:
        """Finished look-ups of the worker, which alone writes it."""
        return int(self._clock[0])

    @worker_clock.setter
    def worker_clock(self, value: int) -> None:
        self._clock[0] = value

    @property
    def busy(self) -> bool:
        """Whether the worker is inside a step and may hold slots; the worker alone writes it."""
        return bool(self._busy[0])

    @busy.setter
    def busy(self, value: bool) -> None:
        self._busy[0] = value

    @property
    def abort(self) -> bool:
        """The worker's flag that ends every wait inside a graph."""
        return bool(self._abort[0])

    @abort.setter
    def abort(self, value: bool) -> None:
        self._abort[0] = value

    def close(self) -> None:
        """Drop the views and unmap."""
        empty = np.empty((0, 0), np.uint8)
        self.slot_table, self.uses = empty.view(np.int8).astype(np.int32), empty.astype(np.uint64)
        self._clock = self._busy = self._abort = empty.ravel()  # type: ignore[assignment]
        self._slab.close()


def _block_bytes(layers: int, experts: int) -> int:
    return _aligned(_TABLE + 4 * layers * experts) + 8 * layers * experts


def _aligned(offset: int) -> int:
    return -(-offset // _LINE) * _LINE
