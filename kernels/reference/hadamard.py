"""Walsh-Hadamard transform in natural (Sylvester) order."""

from __future__ import annotations

import torch


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x: [..., n], n a power of two; returns H x * n^-0.5 in the type of x, butterflies in float32, rounded once."""
    n = x.shape[-1]
    y = x.to(torch.float32)
    half = 1
    while half < n:
        pairs = y.unflatten(-1, (-1, 2, half))
        a, b = pairs.unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return (y * n**-0.5).to(x.dtype)
