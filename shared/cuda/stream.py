"""Copies from pinned memory to the GPU, beside whatever else it computes."""

from __future__ import annotations

from shared.cuda.device import Device
from shared.cuda.driver import api, call, release


class CopyStream:
    """A stream for copies in their order. Those of several streams, and kernels, run at the same time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.use()
        self._stream = call("cuStreamCreate", api().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._copied = call("cuEventCreate", api().CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def start(self, target: int, source: int, nbytes: int) -> None:
        """Begin to copy pinned host memory at `source` to device memory at `target`; neither may change until `wait`.

        The device's context must be current in this thread. Raises DeviceError.
        """
        call("cuMemcpyHtoDAsync", target, source, nbytes, self._stream)

    def wait(self) -> None:
        """Returns when all that was started is seen to be there.

        Raises:
            DeviceError: it is not. `Device.is_alive` says whether there is any use in trying again.
        """
        call("cuEventRecord", self._copied, self._stream)
        call("cuEventSynchronize", self._copied)

    def close(self) -> None:
        self._device.settle()
        release("cuEventDestroy", self._copied)
        release("cuStreamDestroy", self._stream)
