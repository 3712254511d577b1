"""What the indexer does to queries and keys: a Walsh-Hadamard transform, then e2m1 with one scale a block."""

from __future__ import annotations

import functools
import math

import torch

from kernels.reference.constants import constant
from kernels.reference.scale import ceil_power_of_two, floor_power_of_two

E2M1_MAX = 6.0
SMALLEST_AMAX = 6.0 * 2.0**-126


def fp4_simulate(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """x: [..., k], k a multiple of `block`; returns q * scale in the type of x.

    scale = 2^ceil(log2(amax / 6)); q rounds to 0, .5, 1, 1.5, 2, 3, 4, 6 with ties to the even code.
    """
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // block, block)
    amax = torch.linalg.vector_norm(blocks, math.inf, -1, keepdim=True).clamp_min_(SMALLEST_AMAX)
    scale = ceil_power_of_two(amax, E2M1_MAX)
    # The grid's step doubles at 2 and at 4; inside each stretch, ties to even codes are ties to even multiples.
    # A step is half the power of two below the value, but not under 0.5, so bits and a floor give it.
    scaled = blocks / scale
    step = floor_power_of_two(scaled).clamp_min_(constant(1.0, x.device)).mul_(constant(0.5, x.device))
    return (scaled / step).round_().mul_(step.mul_(scale)).view(x.shape).type(x.dtype)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """H x * n^-0.5 with H in natural (Sylvester) order, summed in float32, rounded once to the type of x.

    x: [..., n], n a power of two.
    """
    n = x.shape[-1]
    return (x.float() @ _signs(n, x.device)).mul_(constant(n**-0.5, x.device)).type(x.dtype)


def hadamard_fp4(x: torch.Tensor) -> torch.Tensor:
    """`hadamard`, then `fp4_simulate`. x: [..., n], n a power of two and at least 32; returns the type of x."""
    return fp4_simulate(hadamard(x))


@functools.cache
def _signs(n: int, device: torch.device) -> torch.Tensor:
    """H, float32 [n, n] of 1 and -1; symmetric."""
    if n == 1:
        return torch.ones(1, 1, device=device)
    half = _signs(n // 2, device)
    return torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))
