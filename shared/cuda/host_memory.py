"""Host memory that a GPU reaches: registered with the driver, so its pages stay put and copies run at full speed."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from shared.cuda.device import Device
from shared.cuda.driver import api, call, release
from shared.errors import CapacityError, DeviceError
from shared.memory.io_buffer import io_buffer


class Registration:
    """Memory of this process that the GPU may read and write at `device_address`, until `close`.

    Must be closed before the memory is unmapped.
    """

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        """All pages from `address`, at the start of one, on. Raises CapacityError if the driver will not have them."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._device = device
        self._address: int | None = address
        device.use()
        try:
            call("cuMemHostRegister", address, nbytes, api().CU_MEMHOSTREGISTER_DEVICEMAP)
        except DeviceError as error:
            raise CapacityError(f"cannot pin {nbytes:,} bytes of host memory for the GPU ({error})") from error
        self.device_address = int(call("cuMemHostGetDevicePointer", address, 0))

    def close(self) -> None:
        """Idempotent."""
        if self._address is not None:
            address, self._address = self._address, None
            self._device.settle()
            release("cuMemHostUnregister", address)


class PinnedBuffer:
    """Page-aligned anonymous memory, registered: O_DIRECT reads go into it, copies to the GPU come out of it.

    Not the driver's own allocation: not every version of it lets the kernel read files there.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises CapacityError if it cannot be had."""
        try:
            self._memory = io_buffer(nbytes)
        except OSError as error:
            raise CapacityError(f"cannot allocate {nbytes:,} bytes of host memory ({error.strerror})") from error
        self.view: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self.address: int = self.view.ctypes.data
        self._registration = Registration(device, self.address, nbytes)

    def close(self) -> None:
        """The pages go with the last view of them."""
        self._registration.close()
