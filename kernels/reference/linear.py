"""Products with dense weights. Those in FP8 a device prepares once, at load, in the form that suits it.

Here that is float32: exact, and faster on a CPU than decoding at every use. A GPU's twin keeps the stored bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference.dequant import dequant_fp8


def prepare_fp8(*weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Weights of the same input, one above the other, as `fp8_linear` wants them; opaque to everyone else.

    Each: weight [n, k] float8_e4m3fn, scale [ceil(n/128), ceil(k/128)] float8_e8m0fnu.
    """
    parts = [dequant_fp8(weight, scale) for weight, scale in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x: [..., k] as `act_round` leaves it, or not quantised; weight: from `prepare_fp8`.

    Returns x @ weight^T, [..., n] in `dtype`.
    """
    return F.linear(x.float(), weight).type(dtype)


def float_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that is not quantised: x [..., k], weight [n, k], bfloat16 or float32; returns float32 [..., n]."""
    return F.linear(x.float(), weight.float())
