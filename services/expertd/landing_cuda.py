"""Records for slots in GPU memory: read into a pinned buffer, then copied by the GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.cuda.host_memory import PinnedBuffer
from shared.cuda.stream import CopyStream
from shared.memory.cuda_slab import CudaSlab


class CudaLanding:
    """One slot's worth of pinned memory and a stream. The copy is waited for, and then both are free again."""

    def __init__(self, slab: CudaSlab, slot_bytes: int) -> None:
        """Raises CapacityError."""
        self._slab = slab
        self._slot_bytes = slot_bytes
        self._buffer = PinnedBuffer(slab.device, slot_bytes)
        self._stream = CopyStream(slab.device)

    def memory(self, slot: int) -> npt.NDArray[np.uint8]:
        return self._buffer.view

    def land(self, slot: int) -> None:
        self._stream.copy(self._slab.address + slot * self._slot_bytes, self._buffer.address, self._slot_bytes)

    def is_alive(self) -> bool:
        return self._slab.device.is_alive()

    def close(self) -> None:
        self._stream.close()
        self._buffer.close()
