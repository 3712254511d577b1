"""Rotary positions on interleaved pairs (https://arxiv.org/abs/2104.09864), with YaRN's stretched frequencies.

YaRN (https://arxiv.org/abs/2309.00071) without its magnitude factor.
"""

from __future__ import annotations

import math

import torch


def rope_frequencies(dim: int, base: float) -> torch.Tensor:
    """base^(-2i / dim), float32 [dim / 2]."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies(
    dim: int, base: float, factor: float, beta_fast: float, beta_slow: float, original_positions: int
) -> torch.Tensor:
    """Frequencies that turn fewer than `beta_slow` times in the original context are divided by `factor`, those that
    turn more than `beta_fast` times are kept, and between them lies a ramp. float32 [dim / 2]."""

    def turns_at(turns: float) -> float:
        return dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns_at(beta_fast)), 0)
    high = min(math.ceil(turns_at(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = rope_frequencies(dim, base)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def rope_table(frequencies: torch.Tensor, positions: int) -> torch.Tensor:
    """exp(i * frequency * position), complex64 [positions, dim / 2]; the angle is a float32 product."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rope(x: torch.Tensor, rotation: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the last dimensions of x, all of which `rotation` covers from the end; the others pass.

    x: [n, ..., d]; rotation: complex64 [n, r / 2], r <= d. Arithmetic in float32, one rounding to the type of x.
    """
    half = rotation.shape[-1]
    out = x.clone(memory_format=torch.contiguous_format)
    turned = out.narrow(-1, x.shape[-1] - 2 * half, 2 * half)
    factor = (rotation.conj() if inverse else rotation).view(-1, *(1,) * (x.dim() - 2), half)
    pairs = torch.view_as_complex(turned.float().view(*x.shape[:-1], half, 2))
    turned.copy_(torch.view_as_real(pairs * factor).view(turned.shape))
    return out
