"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., d], weight: [d] float32. All in float32, one rounding to the type of x."""
    y = x.to(torch.float32)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def head_norm(q: torch.Tensor, eps: float) -> torch.Tensor:
    """The query's norm per head: no weight, and every step in the type of q. q: [..., heads, head_dim]."""
    return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps)
