"""Weights as stored, to float32; exact, since every stored value times a power of two is a float32."""

from __future__ import annotations

import torch

from kernels.reference.scale import decode_scale

FP8_BLOCK = 128
FP4_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = torch.tensor(_E2M1 + tuple(-v for v in _E2M1))
# Both values of every byte: element 2i in the low nibble, 2i + 1 in the high one.
_PAIRS = torch.stack((_CODES.repeat(16), _CODES.repeat_interleave(16)), -1)


def dequant_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight: [n, k] float8_e4m3fn, scale: [ceil(n/128), ceil(k/128)] float8_e8m0fnu; returns [n, k] float32."""
    n, k = weight.shape
    rows = decode_scale(scale).repeat_interleave(FP8_BLOCK, 0)[:n]
    return weight.to(torch.float32) * rows.repeat_interleave(FP8_BLOCK, 1)[:, :k]


def dequant_fp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight: [n, k/2] uint8 or int8, two e2m1 codes a byte; scale: [n, k/32] float8_e8m0fnu; returns [n, k] float32."""
    values = _PAIRS[weight.view(torch.uint8).to(torch.int32)]
    blocks = values.view(weight.shape[0], -1, FP4_BLOCK)
    return (blocks * decode_scale(scale).unsqueeze(-1)).flatten(1)
