"""Numbers as tensors: an operation with a tensor of no dimension costs half of one with a Python number."""

from __future__ import annotations

import functools

import torch


@functools.cache
def constant(value: float, device: torch.device) -> torch.Tensor:
    """float32 [] on the device: some operations take a number of the CPU with tensors of a GPU, and some do not."""
    return torch.tensor(value, device=device)
