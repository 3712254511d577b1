"""The slot pool as a tensor: a view of memory that a slab maps, on the device where it lies."""

from __future__ import annotations

import torch

from shared.memory.host import HostSlab
from shared.memory.slab import Slab


class _DeviceMemory:
    """Device memory in the words of the CUDA array interface (version 3, as Numba documents it)."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }


def pool_tensor(slab: Slab, num_slots: int, slot_bytes: int, device: str) -> torch.Tensor:
    """uint8 [num_slots, slot_bytes] on `device`. It does not keep the mapping: drop it before the slab is closed."""
    if isinstance(slab, HostSlab):
        return torch.from_numpy(slab.view()).view(num_slots, slot_bytes)
    return torch.as_tensor(_DeviceMemory(slab.address, (num_slots, slot_bytes)), device=device)
