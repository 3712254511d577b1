"""The checkpoint's number formats on tensors: FP8 in blocks of 128x128, FP4 in blocks of 32, activations.

`*_codes` give what is stored, `*_rounded` the values that the stored form stands for. Scales are powers of two, held
as the exponent's byte (ue8m0: 2^(byte-127)). Formats: OCP Microscaling v1.0 and the model card of V4.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX, FP4_MAX = 448.0, 6.0
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half-way between neighbours; where it ends in an even code, the tie goes up.
_FP4_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FP4_TIES_UP = (False, True, False, True, False, True, False)


def _exponents(amax: Tensor, largest: float) -> Tensor:
    """The smallest e with amax <= largest * 2^e, as integers in [-127, 127]."""
    return torch.ceil(torch.log2(amax.clamp_min(2.0**-120) / largest)).clamp(-127, 127)


def fp8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> float8_e4m3fn [out, in] and scale bytes uint8 [out/128, in/128]; both sides multiples of 128."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
    exponents = _exponents(blocks.abs().amax((1, 3), keepdim=True), FP8_MAX)
    scaled = (blocks * torch.exp2(-exponents)).view(rows, columns)
    return scaled.to(torch.float8_e4m3fn), (exponents[:, 0, :, 0] + 127).to(torch.uint8)


def fp8_rounded(weight: Tensor) -> Tensor:
    """Float32 [out, in], the values that `fp8_codes` stores."""
    codes, scales = fp8_codes(weight)
    rows, columns = weight.shape
    factors = torch.exp2(scales.float() - 127)[:, None, :, None]
    return (codes.float().view(rows // 128, 128, columns // 128, 128) * factors).view(rows, columns)


def _fp4_split(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Code numbers 0-7 of the magnitudes [.., in/32, 32], the values' signs, and exponents [.., in/32, 1]."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    exponents = _exponents(blocks.abs().amax(-1, keepdim=True), FP4_MAX)
    magnitudes = blocks.abs() * torch.exp2(-exponents)
    codes = torch.zeros_like(magnitudes, dtype=torch.uint8)
    for border, up in zip(_FP4_BORDERS, _FP4_TIES_UP, strict=True):
        codes += (magnitudes >= border) if up else (magnitudes > border)
    return codes, blocks < 0, exponents


def fp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[.., in] -> int8 [.., in/2], the even element in the low half, and scale bytes uint8 [.., in/32]."""
    codes, negative, exponents = _fp4_split(weight)
    nibbles = (codes | (negative.to(torch.uint8) << 3)).flatten(-2)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed.view(torch.int8), (exponents[..., 0] + 127).to(torch.uint8)


def fp4_rounded(weight: Tensor) -> Tensor:
    """Float32 of the same shape, the values that `fp4_codes` stores."""
    codes, negative, exponents = _fp4_split(weight)
    values = torch.tensor(_FP4_VALUES, device=weight.device)[codes.int()]
    return (torch.where(negative, -values, values) * torch.exp2(exponents)).flatten(-2)


def activation(x: Tensor, block: int = 128) -> Tensor:
    """x as a quantised linear sees it, [.., n * block]; its gradient passes as if nothing had happened."""
    blocks = x.float().unflatten(-1, (-1, block))
    exponents = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX))
    scaled = (blocks * torch.exp2(-exponents)).clamp(-FP8_MAX, FP8_MAX)
    rounded = (scaled.to(torch.float8_e4m3fn).float() * torch.exp2(exponents)).flatten(-2).to(x.dtype)
    return x + (rounded - x).detach()
