"""Slabs in GPU memory: which kind this GPU can share, and whether a peer's slab is on the GPU that it should be."""

from __future__ import annotations

import logging
import uuid
from typing import Any, Protocol

from shared.cuda.device import Device
from shared.errors import CapacityError, ConfigError, DeviceError
from shared.memory import cuda_ipc, cuda_vmm
from shared.memory.cuda_slab import CudaSlab
from shared.memory.handle import foreign_handle, unpack_handle

log = logging.getLogger(__name__)


class Kind(Protocol):
    """A way to share GPU memory; the modules cuda_ipc and cuda_vmm are these."""

    KIND: str

    def is_supported(self, device: Device) -> bool: ...

    def create(self, device: Device, nbytes: int) -> CudaSlab: ...

    def open_(self, device: Device, nbytes: int, fields: list[Any]) -> CudaSlab: ...


# In the order in which they are tried.
KINDS: dict[str, Kind] = {cuda_ipc.KIND: cuda_ipc, cuda_vmm.KIND: cuda_vmm}


def create_cuda_slab(nbytes: int, name: str) -> CudaSlab:
    """Allocate on the GPU that `name` ("cuda" or "cuda:N") means, in the first way that it can share.

    Raises:
        CapacityError: not so much memory is free, or the GPU can share none.
        ConfigError: there is no such GPU.
    """
    device = Device.named(name)
    refusals = []
    for kind in KINDS.values():
        if not kind.is_supported(device):
            refusals.append(f"{kind.KIND}: not supported")
            continue
        try:
            slab = kind.create(device, nbytes)
        except DeviceError as error:
            if error.result == "CUDA_ERROR_OUT_OF_MEMORY":
                raise _too_large(nbytes, device) from error
            refusals.append(f"{kind.KIND}: {error}")
        else:
            log.info("GPU memory shared kind=%s bytes=%d gpu=%s", kind.KIND, nbytes, device.uuid)
            return slab
    raise CapacityError(f"this GPU cannot share memory between processes ({'; '.join(refusals)})")


def open_cuda_slab(handle: bytes, name: str) -> CudaSlab:
    """Map a slab of another process on the GPU that `name` means.

    Raises:
        ProtocolError: not a handle of GPU memory.
        ConfigError: the slab is on another GPU, or `name` means none.
        CapacityError: the owner is gone, or the driver cannot map it.
    """
    kind, fields = unpack_handle(handle)
    match fields:
        case [bytes(gpu), int(nbytes), *rest] if kind in KINDS and len(gpu) == 16 and nbytes > 0:
            device = _device_with(uuid.UUID(bytes=gpu), name)
            try:
                return KINDS[kind].open_(device, nbytes, rest)
            except DeviceError as error:
                raise CapacityError(f"cannot map the pool's GPU memory ({error})") from error
    raise foreign_handle(kind, fields)


def _device_with(gpu: uuid.UUID, name: str) -> Device:
    if name == "cpu":
        raise ConfigError(f'the pool is in the memory of GPU {gpu}, but worker.device = "cpu"')
    device = Device.named(name)
    if device.uuid != gpu:
        raise ConfigError(
            f'the pool is in the memory of GPU {gpu}, but worker.device = "{name}" is GPU {device.uuid} here; '
            f"give expertd and the worker the same config and CUDA_VISIBLE_DEVICES"
        )
    return device


def _too_large(nbytes: int, device: Device) -> CapacityError:
    free = device.memory().free
    return CapacityError(f"cannot allocate {nbytes:,} bytes of GPU memory for the pool, {free:,} are free")
