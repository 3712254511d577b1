"""Numbers as tensors: an operation with a tensor of no dimension costs half of one with a Python number."""

from __future__ import annotations

import functools

import torch


@functools.cache
def constant(value: float) -> torch.Tensor:
    """float32 []; on the CPU, but operations with tensors of any device take it."""
    return torch.tensor(value)
