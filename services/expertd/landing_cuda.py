"""Records for slots in GPU memory: read into pinned memory, and copied from there piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from shared.checkpoint.records import LARGEST_HOLE, PARTS
from shared.cuda.host_memory import PinnedBuffer
from shared.cuda.stream import CopyStream
from shared.memory.cuda_slab import CudaSlab

Bytes = npt.NDArray[np.uint8]
PAGE = 4096
# Beyond a slot's worth: what an extent covers before, between and behind its pieces, and there is at most one a part.
MARGIN = len(PARTS) * (2 * PAGE + LARGEST_HOLE)


class CudaLanding:
    """Pinned memory for all that is read for one record, and a stream. Both are free again when the copies are done."""

    def __init__(self, slab: CudaSlab, slot_bytes: int) -> None:
        """Raises CapacityError."""
        self._slab = slab
        self._slot_bytes = slot_bytes
        self._buffer = PinnedBuffer(slab.device, slot_bytes + MARGIN)
        self._stream = CopyStream(slab.device)

    def enter_thread(self) -> None:
        self._slab.device.use()

    @contextmanager
    def into(self, slot: int) -> Iterator[CudaSlot]:
        try:
            yield CudaSlot(self._slab.address + slot * self._slot_bytes, self._buffer.view, self._stream)
        finally:
            self._stream.wait()

    def is_alive(self) -> bool:
        return self._slab.device.is_alive()

    def close(self) -> None:
        self._stream.close()
        self._buffer.close()


class CudaSlot:
    """A slot at a device address. What has arrived in `buffer` is copied while the rest is read."""

    def __init__(self, address: int, buffer: Bytes, stream: CopyStream) -> None:
        self._address = address
        self._buffer = buffer
        self._stream = stream
        self._pieces: dict[int, Bytes] = {}

    def memory(self, target: int, nbytes: int) -> None:
        """No file can be read into a GPU's memory."""

    def staging(self, nbytes: int) -> Bytes:
        assert nbytes <= len(self._buffer), "a record of more extents than it has parts"
        return self._buffer[:nbytes]

    def put(self, target: int, piece: Bytes) -> None:
        self._stream.start(self._address + target, piece.ctypes.data, len(piece))
        self._pieces[target] = piece

    def crc32(self, nbytes: int) -> int:
        checksum = end = 0
        for target, piece in sorted(self._pieces.items()):
            assert target == end, f"bytes {end} to {target} of the record were not put"
            checksum, end = zlib.crc32(piece.data, checksum), target + len(piece)
        assert end == nbytes
        return checksum
