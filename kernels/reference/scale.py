"""Power-of-two scales (ue8m0): one byte e stands for 2^(e - 127), and multiplies."""

from __future__ import annotations

import functools
import struct

import torch

_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_MANTISSA = 0x7FFFFF


def ceil_power_of_two(x: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """2^ceil(log2(x / divisor)), exact, from the bits. x: float32, normal and positive; any shape.

    For the maxima of e4m3 and e2m1, 448 and 6, that is also what the float32 product x * (1 / divisor) gives.
    """
    return (x.view(torch.int32) + _carry(divisor)).bitwise_and_(_EXPONENT).view(torch.float32)


def carry(divisor: float) -> int:
    """What to add to a float32's bits so that its exponent becomes that of `ceil_power_of_two`: raised where the
    mantissa is above the divisor's, lowered by the divisor's exponent."""
    (bits,) = struct.unpack("<i", struct.pack("<f", divisor))
    mantissa, exponent = bits & _MANTISSA, (bits >> 23) - 127
    return _MANTISSA - mantissa - (exponent << 23)


@functools.cache
def _carry(divisor: float) -> torch.Tensor:
    return torch.tensor(carry(divisor), dtype=torch.int32)


def floor_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """2^floor(log2 |x|), exact, from the bits. x: float32, finite; zero and subnormals give zero."""
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32)


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """float32 values of float8_e8m0fnu scales, any shape; byte 255 is NaN."""
    return scale.float()
