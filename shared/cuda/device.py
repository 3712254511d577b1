"""One GPU and its primary context, which is the one that torch uses too."""

from __future__ import annotations

import ctypes
import logging
import uuid
from typing import NamedTuple

from shared.config import gpu_ordinal
from shared.cuda.driver import api, call
from shared.errors import ConfigError, DeviceError

log = logging.getLogger(__name__)


class MemoryInfo(NamedTuple):
    """Bytes of the GPU's memory."""

    free: int
    total: int


class Device:
    """A GPU with its context retained, until the process ends.

    A context is current in one thread at a time: call `use` in each thread before the driver does anything with it.
    """

    def __init__(self, ordinal: int) -> None:
        count = call("cuDeviceGetCount")
        if ordinal >= count:
            raise ConfigError(f'worker.device = "cuda:{ordinal}", but CUDA shows {count} GPUs, counted from 0')
        self.ordinal = ordinal
        self._device = call("cuDeviceGet", ordinal)
        self._context = call("cuDevicePrimaryCtxRetain", self._device)
        self.use()

    @classmethod
    def named(cls, name: str) -> Device:
        """The GPU that worker.device names.

        Raises:
            ConfigError: there is no such GPU, or CUDA is not to be had.
        """
        return cls(gpu_ordinal(name))

    @property
    def uuid(self) -> uuid.UUID:
        """The same in every process, whatever CUDA_VISIBLE_DEVICES makes of the ordinals."""
        return uuid.UUID(bytes=ctypes.string_at(call("cuDeviceGetUuid", self._device).getPtr(), 16))

    def use(self) -> None:
        """Make the context current in this thread."""
        call("cuCtxSetCurrent", self._context)

    def attribute(self, name: str) -> int:
        """A `CUdevice_attribute` of cuda.h by its name without the prefix; 0 if this version of CUDA has none such."""
        which = getattr(api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if which is None else int(call("cuDeviceGetAttribute", which, self._device))

    def memory(self) -> MemoryInfo:
        self.use()
        return MemoryInfo(*map(int, call("cuMemGetInfo")))

    def synchronize(self) -> None:
        """Wait for everything that was started in the context. Raises DeviceError if any of it failed."""
        self.use()
        call("cuCtxSynchronize")

    def settle(self) -> None:
        """Before something is unmapped: wait until nothing on the GPU uses it. If the GPU failed, nothing does."""
        try:
            self.synchronize()
        except DeviceError as error:
            log.warning("the GPU failed before this process was done with it: %s", error)

    def is_alive(self) -> bool:
        """Whether the context still works. After a fault on the GPU every call fails until the process ends."""
        try:
            self.synchronize()
        except DeviceError:
            return False
        return True
