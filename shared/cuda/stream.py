"""Copies from pinned memory to the GPU, beside whatever else it computes."""

from __future__ import annotations

from shared.cuda.device import Device
from shared.cuda.driver import api, call, release


class CopyStream:
    """A stream for one thread's copies. Those of several streams, and kernels, run at the same time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.use()
        self._stream = call("cuStreamCreate", api().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._copied = call("cuEventCreate", api().CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy pinned host memory at `source` to device memory at `target`; returns when the bytes are seen there.

        Raises:
            DeviceError: they are not. `Device.is_alive` says whether there is any use in trying again.
        """
        self._device.use()
        call("cuMemcpyHtoDAsync", target, source, nbytes, self._stream)
        call("cuEventRecord", self._copied, self._stream)
        call("cuEventSynchronize", self._copied)

    def close(self) -> None:
        self._device.settle()
        release("cuEventDestroy", self._copied)
        release("cuStreamDestroy", self._stream)
