"""GPU memory by CUDA's virtual memory management (cuMemCreate): a peer gets a file descriptor and maps its memory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from shared.cuda.device import Device
from shared.cuda.driver import api, call, release
from shared.memory.cuda_slab import CudaSlab, rounded
from shared.memory.descriptor import DescriptorServer, receive_descriptor
from shared.memory.handle import foreign_handle, pack_handle

KIND = "cuda-vmm"


def is_supported(device: Device) -> bool:
    needed = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    return all(device.attribute(name) for name in needed)


def create(device: Device, nbytes: int) -> CudaSlab:
    """Raises DeviceError."""
    device.use()
    properties = _properties(device)
    minimum = api().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = rounded(nbytes, int(call("cuMemGetAllocationGranularity", properties, minimum)))
    memory = call("cuMemCreate", size, properties, 0)
    with ExitStack() as undo:
        try:
            descriptor = int(call("cuMemExportToShareableHandle", memory, _descriptor_type(), 0))
            server = DescriptorServer(descriptor)
            undo.callback(server.close)
            address = _map(device, memory, size, undo)
        finally:
            release("cuMemRelease", memory)  # the mapping and the descriptor keep it
        handle = pack_handle(KIND, device.uuid.bytes, nbytes, server.name, size)
        return CudaSlab(device, address, nbytes, handle, undo.pop_all())


def open_(device: Device, nbytes: int, fields: list[Any]) -> CudaSlab:
    """Map the slab of another process. Raises DeviceError, ProtocolError, CapacityError."""
    match fields:
        case [str(name), int(size)] if size >= nbytes:
            pass
        case _:
            raise foreign_handle(KIND, fields)
    device.use()
    descriptor = receive_descriptor(name)
    try:
        memory = call("cuMemImportFromShareableHandle", descriptor, _descriptor_type())
    finally:
        os.close(descriptor)
    with ExitStack() as undo:
        try:
            address = _map(device, memory, size, undo)
        finally:
            release("cuMemRelease", memory)
        handle = pack_handle(KIND, device.uuid.bytes, nbytes, name, size)
        return CudaSlab(device, address, nbytes, handle, undo.pop_all())


def _map(device: Device, memory: Any, size: int, undo: ExitStack) -> int:
    """Where `memory` is from now on, readable and writable by the device."""
    address = int(call("cuMemAddressReserve", size, 0, 0, 0))
    undo.callback(release, "cuMemAddressFree", address, size)
    call("cuMemMap", address, size, 0, memory, 0)
    undo.callback(release, "cuMemUnmap", address, size)
    access = api().CUmemAccessDesc()
    access.location.type = api().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.ordinal
    access.flags = api().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call("cuMemSetAccess", address, size, [access], 1)
    return address


def _properties(device: Device) -> Any:
    properties = api().CUmemAllocationProp()
    properties.type = api().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    properties.requestedHandleTypes = _descriptor_type()
    return properties


def _descriptor_type() -> Any:
    return api().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
