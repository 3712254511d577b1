"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch

from kernels.reference.constants import constant


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., d], weight: [d] float32. All in float32, one rounding to the type of x."""
    y = x.float()
    return (y * inverse_rms(y, eps)).mul_(weight).type(x.dtype)


def inverse_rms(y: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(y^2) + eps). y: float32 [..., d]; returns [..., 1]."""
    return y.square().mean(-1, keepdim=True).add_(constant(eps, y.device)).rsqrt_()


def head_norm(q: torch.Tensor, eps: float) -> torch.Tensor:
    """The query's norm per head: no weight, and every step rounded to the type of q. q: [..., heads, head_dim].

    The inverse root is one step, rounded once: torch's own for bfloat16 on a CPU rounds the root before it inverts.
    """
    mean = q.square().mean(-1, keepdim=True).add_(constant(eps, q.device))
    return q * mean.float().rsqrt_().type(q.dtype)
