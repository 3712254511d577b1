"""The gated activation of shared and routed experts, clamped."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference.constants import constant


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, weights: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, in float32, rounded to `dtype`.

    gate, up: [m, width]; weights: [m] routing weights, which come before the down projection, or None.
    """
    low, high = constant(-limit, gate.device), constant(limit, gate.device)
    activated = F.silu(gate.float().clamp_max(high)).mul_(up.float().clamp(low, high))
    return (activated if weights is None else activated.mul_(weights.unsqueeze(-1))).type(dtype)
