"""Manifold-constrained hyper-connections: n residual streams, mixed by matrices that Sinkhorn makes doubly stochastic.

Source: https://arxiv.org/abs/2512.24880 and the DeepSeek-V4 reference, `hc_split_sinkhorn`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def hc_mixes(h: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """The projection of all streams that sets the mixing. h: [m, n, d]; fn: [k, n * d] float32; returns [m, k]."""
    v = h.flatten(1).to(torch.float32)
    return F.linear(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


def hc_split_sinkhorn(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixes: [m, (2 + n) * n], scale: [3], base: [(2 + n) * n], float32.

    Returns pre [m, n] (sigmoid + eps), post [m, n] (2 * sigmoid) and comb [m, n, n]: softmax rows, then `iterations`
    column normalisations with a row normalisation between each two.
    """
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


def hc_pre(h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The sublayer's input: sum of the streams, weighted. h: [m, n, d], pre: [m, n]; returns [m, d] in h's type."""
    return torch.bmm(pre.unsqueeze(1), h.to(torch.float32)).squeeze(1).to(h.dtype)


def hc_post(x: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer: h'[k] = post[k] * x + sum over j of comb[j, k] * h[j].

    x: [m, d], h: [m, n, d], post: [m, n], comb: [m, n, n]; returns [m, n, d] in h's type.
    """
    mixed = torch.bmm(comb.transpose(1, 2), h.to(torch.float32))
    return (post.unsqueeze(-1) * x.to(torch.float32).unsqueeze(1) + mixed).to(h.dtype)


def hc_head_weights(mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float) -> torch.Tensor:
    """Weights of the streams at the end of the model. mixes: [m, n], scale: [1], base: [n]; returns [m, n]."""
    return torch.sigmoid(mixes * scale + base) + eps
