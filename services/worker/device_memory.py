"""Tensors over memory that is not torch's: the slot pool, and the control block as a GPU sees it."""

from __future__ import annotations

import torch

from shared.memory.host import HostSlab
from shared.memory.slab import Slab

_TYPES = {torch.uint8: "|u1", torch.int32: "<i4", torch.int64: "<i8"}


class _DeviceMemory:
    """Memory as the CUDA array interface, version 3, describes it (see Numba's documentation)."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": _TYPES[dtype],
            "data": (address, False),
            "strides": None,
        }


def device_tensor(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor over memory that the GPU `device` reaches at `address`: its own, or registered memory of the host.

    `dtype` is uint8, int32 or int64. The tensor does not keep the mapping: drop it before that is closed.
    """
    return torch.as_tensor(_DeviceMemory(address, shape, dtype), device=device)


def pool_tensor(slab: Slab, num_slots: int, slot_bytes: int, device: str) -> torch.Tensor:
    """uint8 [num_slots, slot_bytes] on `device`; on a GPU it does not keep the mapping."""
    if isinstance(slab, HostSlab):
        return torch.from_numpy(slab.view()).view(num_slots, slot_bytes)
    return device_tensor(slab.address, (num_slots, slot_bytes), torch.uint8, device)


def host_view(pinned: torch.Tensor, device: str) -> torch.Tensor:
    """Pinned memory of the host as a kernel sees it; `pinned` must outlive the view."""
    return device_tensor(pinned.data_ptr(), tuple(pinned.shape), pinned.dtype, device)
