"""The gated activation of shared and routed experts, clamped."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, weights: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, in float32, rounded to `dtype`.

    gate, up: [m, width]; weights: [m] routing weights, which come before the down projection, or None.
    """
    activated = F.silu(gate.to(torch.float32).clamp_max(limit)) * up.to(torch.float32).clamp(-limit, limit)
    return (activated if weights is None else activated * weights.unsqueeze(-1)).to(dtype)
