"""Quantise to e2m1 and back, with one power-of-two scale a block: what the indexer does to its queries and keys."""

from __future__ import annotations

import torch

from kernels.reference.scale import ceil_power_of_two

E2M1_MAX = 6.0
SMALLEST_AMAX = 6.0 * 2.0**-126


def fp4_simulate(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """x: [..., k], k a multiple of `block`; returns q * scale in the type of x.

    scale = 2^ceil(log2(amax / 6)); q rounds to 0, .5, 1, 1.5, 2, 3, 4, 6 with ties to the even code.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)
    scale = ceil_power_of_two(amax * (1.0 / E2M1_MAX))
    scaled = (blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = scaled.abs()
    # The grid's step doubles at 2 and at 4; inside each stretch, ties to even codes are ties to even multiples.
    step = 0.5 + 0.5 * (magnitude >= 2.0) + (magnitude >= 4.0)
    return ((scaled / step).round() * step * scale).flatten(-2).to(x.dtype)
