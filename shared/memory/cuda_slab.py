"""GPU memory that two processes share: what every kind of it has in common."""

from __future__ import annotations

from contextlib import ExitStack

from shared.cuda.device import Device

# Smaller allocations share the driver's blocks with others, which a peer would then map too.
BLOCK_BYTES = 2 << 20


class CudaSlab:
    """One mapping of GPU memory, at the device pointer `address`. `undo` unmaps it and gives up what it was made of.

    Plain device memory: the CPU cannot touch it. A peer's mapping keeps the memory when the owner ends, even killed.
    """

    def __init__(self, device: Device, address: int, nbytes: int, handle: bytes, undo: ExitStack) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self._handle = handle
        self._undo = undo

    def handle(self) -> bytes:
        return self._handle

    def close(self) -> None:
        """Waits for what this process still computes on the GPU, and unmaps."""
        self.device.settle()
        self._undo.close()


def rounded(nbytes: int, block: int = BLOCK_BYTES) -> int:
    return -(-nbytes // block) * block
