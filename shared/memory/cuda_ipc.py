"""GPU memory by CUDA's inter-process handles (cuMemAlloc, cuIpcGetMemHandle): the driver finds the owner by itself."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

from shared.cuda.device import Device
from shared.cuda.driver import api, call, release
from shared.memory.cuda_slab import CudaSlab, rounded
from shared.memory.handle import foreign_handle, pack_handle

KIND = "cuda-ipc"
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


def is_supported(device: Device) -> bool:
    return device.attribute("IPC_EVENT_SUPPORTED") != 0


def create(device: Device, nbytes: int) -> CudaSlab:
    """Raises DeviceError."""
    device.use()
    with ExitStack() as undo:
        address = int(call("cuMemAlloc", rounded(nbytes)))
        undo.callback(release, "cuMemFree", address)
        token = ctypes.string_at(call("cuIpcGetMemHandle", address).getPtr(), _HANDLE_BYTES)
        handle = pack_handle(KIND, device.uuid.bytes, nbytes, token)
        return CudaSlab(device, address, nbytes, handle, undo.pop_all())


def open_(device: Device, nbytes: int, fields: list[Any]) -> CudaSlab:
    """Map the slab of another process; a process cannot open its own. Raises DeviceError, ProtocolError."""
    match fields:
        case [bytes(token)] if len(token) == _HANDLE_BYTES:
            pass
        case _:
            raise foreign_handle(KIND, fields)
    device.use()
    ipc_handle = api().CUipcMemHandle()
    ctypes.memmove(ipc_handle.getPtr(), token, _HANDLE_BYTES)
    flags = api().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    with ExitStack() as undo:
        address = int(call("cuIpcOpenMemHandle", ipc_handle, flags))
        undo.callback(release, "cuIpcCloseMemHandle", address)
        return CudaSlab(device, address, nbytes, pack_handle(KIND, device.uuid.bytes, nbytes, token), undo.pop_all())
