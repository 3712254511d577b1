"""The page that expertd and the worker both see: slot table, clock, flags and use counts.

Each field has one writer and a cache line of its own, and every access is one aligned store or load, which is what the
slot protocol builds on. Knows nothing of that protocol.

Layout, little-endian, offsets in bytes: 0 magic, version, layers, experts (uint32 each) | 64 worker_clock (uint64) |
128 busy (uint32) | 192 abort (uint32) | 256 ticket_head (uint64) | 4096 slot_table int32 [layers, experts] |
uses uint64 [layers, experts] | tickets int32 [64, 64]; the last two begin at multiples of 64.

expertd writes the slot table, the worker everything else: the host or, inside a graph, the GPU, never both at a time.
Tickets are the worker's own, from its GPU to a thread of its host: the GPU fills entry `ticket_head % 64`, fences,
and then adds one to the head; the reader keeps up, because a GPU that asked for something waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.errors import ProtocolError
from shared.memory.host import HostSlab

MAGIC = 0x58424349  # "ICBX"
VERSION = 2
TICKETS, TICKET_WORDS = 64, 64
_HEADER = 16
_CLOCK, _BUSY, _ABORT, _HEAD, _TABLE = 64, 128, 192, 256, 4096
_LINE = 64
NO_SLOT = -1


class Addresses(NamedTuple):
    """Where a kernel finds the fields: pointers, of the types that the layout above says."""

    worker_clock: int
    abort: int
    ticket_head: int
    slot_table: int
    uses: int
    tickets: int


class ControlBlock:
    """One mapping of the control block; `slot_table`, `uses` and `tickets` are live views."""

    def __init__(self, slab: HostSlab, layers: int, experts: int) -> None:
        self._slab = slab
        memory = slab.view()
        cells = layers * experts
        uses_at, tickets_at, _ = self._offsets = _offsets(layers, experts)
        self._clock = memory[_CLOCK : _CLOCK + 8].view(np.uint64)
        self._busy = memory[_BUSY : _BUSY + 4].view(np.uint32)
        self._abort = memory[_ABORT : _ABORT + 4].view(np.uint32)
        self._ticket_head = memory[_HEAD : _HEAD + 8].view(np.uint64)
        self.slot_table: npt.NDArray[np.int32] = (
            memory[_TABLE : _TABLE + 4 * cells].view(np.int32).reshape(layers, experts)
        )
        self.uses: npt.NDArray[np.uint64] = (
            memory[uses_at : uses_at + 8 * cells].view(np.uint64).reshape(layers, experts)
        )
        self.tickets: npt.NDArray[np.int32] = (
            memory[tickets_at : tickets_at + 4 * TICKETS * TICKET_WORDS].view(np.int32).reshape(TICKETS, TICKET_WORDS)
        )

    @classmethod
    def create(cls, moe_layers: int, experts: int) -> ControlBlock:
        """A new one: nothing resident, clock 0, idle."""
        slab = HostSlab.create(_offsets(moe_layers, experts).end)
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
        slab = HostSlab.open(handle)
        header = slab.view()[:_HEADER].tobytes().ljust(_HEADER, b"\0")
        magic, version, layers, experts = (int(word) for word in np.frombuffer(header, np.uint32))
        if (magic, version, slab.nbytes) != (MAGIC, VERSION, _offsets(layers, experts).end):
            slab.close()
            raise ProtocolError(
                f"the shared memory is no control block of version {VERSION} (magic {magic:#x}, version {version}, "
                f"{layers} layers of {experts} experts in {slab.nbytes} bytes)"
            )
        return cls(slab, layers, experts)

    def handle(self) -> bytes:
        return self._slab.handle()

    @property
    def address(self) -> int:
        """Where this process has it mapped, at the start of a page."""
        return self._slab.address

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes

    def addresses(self, base: int) -> Addresses:
        """Of the fields, where the block lies at `base`: `address`, or where a GPU has it mapped."""
        return Addresses(
            worker_clock=base + _CLOCK,
            abort=base + _ABORT,
            ticket_head=base + _HEAD,
            slot_table=base + _TABLE,
            uses=base + self._offsets.uses,
            tickets=base + self._offsets.tickets,
        )

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

    @property
    def ticket_head(self) -> int:
        """How many tickets there have been; the worker's GPU counts them, its host sets 0 before the first."""
        return int(self._ticket_head[0])

    @ticket_head.setter
    def ticket_head(self, value: int) -> None:
        self._ticket_head[0] = value

    def close(self) -> None:
        """Drop the views and unmap."""
        empty = np.empty((0, 0), np.uint8)
        self.slot_table = self.tickets = empty.astype(np.int32)
        self.uses = empty.astype(np.uint64)
        self._clock = self._busy = self._abort = self._ticket_head = empty.ravel()  # type: ignore[assignment]
        self._slab.close()


class _Offsets(NamedTuple):
    """What depends on the model's shape, in bytes."""

    uses: int
    tickets: int
    end: int


def _offsets(layers: int, experts: int) -> _Offsets:
    uses = _aligned(_TABLE + 4 * layers * experts)
    tickets = _aligned(uses + 8 * layers * experts)
    return _Offsets(uses, tickets, tickets + 4 * TICKETS * TICKET_WORDS)


def _aligned(offset: int) -> int:
    return -(-offset // _LINE) * _LINE
