"""Power-of-two scales (ue8m0): one byte e stands for 2^(e - 127), and multiplies."""

from __future__ import annotations

import torch

_MANTISSA = torch.tensor(0x7FFFFF, dtype=torch.int32)
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_SIGN_AND_EXPONENT = torch.tensor(-0x800000, dtype=torch.int32)


def ceil_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 x), exact, from the bits. x: float32, normal and positive; any shape."""
    # Adding the mask carries into the exponent unless the mantissa is zero already.
    return (x.view(torch.int32) + _MANTISSA).bitwise_and_(_SIGN_AND_EXPONENT).view(torch.float32)


def floor_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """2^floor(log2 |x|), exact, from the bits. x: float32, finite; zero and subnormals give zero."""
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32)


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """float32 values of float8_e8m0fnu scales, any shape; byte 255 is NaN."""
    return scale.to(torch.float32)
