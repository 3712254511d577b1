"""Walsh-Hadamard transform in natural (Sylvester) order."""

from __future__ import annotations

import functools

import torch

from kernels.reference.constants import constant


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x: [..., n], n a power of two; returns H x * n^-0.5 in the type of x, summed in float32, rounded once."""
    n = x.shape[-1]
    return (x.float() @ _signs(n)).mul_(constant(n**-0.5)).type(x.dtype)


@functools.cache
def _signs(n: int) -> torch.Tensor:
    """H, float32 [n, n] of 1 and -1; symmetric."""
    if n == 1:
        return torch.ones(1, 1)
    half = _signs(n // 2)
    return torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))
