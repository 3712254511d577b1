"""Manifold-constrained hyper-connections: n residual streams, mixed by matrices that Sinkhorn makes doubly stochastic.

Source: https://arxiv.org/abs/2512.24880 and the DeepSeek-V4 reference, `hc_split_sinkhorn`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from kernels.reference.norm import inverse_rms


def hc_mixes(h: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """The projection of all streams that sets the mixing. h: [m, n, d]; fn: [k, n * d] float32; returns [m, k]."""
    v = h.flatten(1).float()
    return F.linear(v, fn).mul_(inverse_rms(v, eps))


def hc_split_sinkhorn(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixes: [m, (2 + n) * n], scale: [3], base: [(2 + n) * n], float32.

    Returns pre [m, n] (sigmoid + eps), post [m, n] (2 * sigmoid) and comb [m, n, n]: softmax rows, then `iterations`
    column normalisations with a row normalisation between each two.
    """
    split = _split_one if len(mixes) == 1 and n == 4 and not mixes.is_cuda else _split
    return split(mixes, scale, base, n, iterations, eps)


def _split(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


def _split_one(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for one token: arithmetic on 24 floats is faster in Python than the dispatch of 150 operations."""
    factors = scale.tolist()
    scaled = [
        mix * factors[min(i // n, 2)] + offset
        for i, (mix, offset) in enumerate(zip(mixes[0].tolist(), base.tolist(), strict=True))
    ]
    gates = [0.5 + 0.5 * math.tanh(0.5 * x) for x in scaled[: 2 * n]]
    rows = [_softmax(scaled[begin : begin + n], eps) for begin in range(2 * n, len(scaled), n)]
    values = [g + eps for g in gates[:n]] + [2 * g for g in gates[n:]] + _sinkhorn_4x4(rows, iterations, eps)
    pre, post, comb = torch.tensor(values).unsqueeze(0).split((n, n, n * n), -1)
    return pre, post, comb.view(1, n, n)


def _softmax(row: list[float], eps: float) -> list[float]:
    top = max(row)
    exponentials = [math.exp(x - top) for x in row]
    total = sum(exponentials)
    return [x / total + eps for x in exponentials]


def _sinkhorn_4x4(rows: list[list[float]], iterations: int, eps: float) -> list[float]:
    """The normalised matrix, row after row.

    Only the factors r of rows and c of columns are iterated: the matrix stays diag(r) * rows * diag(c).
    """
    (a0, a1, a2, a3), (b0, b1, b2, b3), (d0, d1, d2, d3), (e0, e1, e2, e3) = rows
    r0 = r1 = r2 = r3 = c0 = c1 = c2 = c3 = 1.0
    for number in range(iterations):
        if number:
            r0 = r0 / (r0 * (a0 * c0 + a1 * c1 + a2 * c2 + a3 * c3) + eps)
            r1 = r1 / (r1 * (b0 * c0 + b1 * c1 + b2 * c2 + b3 * c3) + eps)
            r2 = r2 / (r2 * (d0 * c0 + d1 * c1 + d2 * c2 + d3 * c3) + eps)
            r3 = r3 / (r3 * (e0 * c0 + e1 * c1 + e2 * c2 + e3 * c3) + eps)
        c0 = c0 / (c0 * (a0 * r0 + b0 * r1 + d0 * r2 + e0 * r3) + eps)
        c1 = c1 / (c1 * (a1 * r0 + b1 * r1 + d1 * r2 + e1 * r3) + eps)
        c2 = c2 / (c2 * (a2 * r0 + b2 * r1 + d2 * r2 + e2 * r3) + eps)
        c3 = c3 / (c3 * (a3 * r0 + b3 * r1 + d3 * r2 + e3 * r3) + eps)
    columns = (c0, c1, c2, c3)
    return [r * x * c for r, row in zip((r0, r1, r2, r3), rows, strict=True) for x, c in zip(row, columns, strict=True)]


def hc_pre(h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The sublayer's input: sum of the streams, weighted. h: [m, n, d], pre: [m, n]; returns [m, d] in h's type."""
    return torch.bmm(pre.unsqueeze(1), h.float()).squeeze(1).type(h.dtype)


def hc_post(x: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer: h'[k] = post[k] * x + sum over j of comb[j, k] * h[j].

    x: [m, d], h: [m, n, d], post: [m, n], comb: [m, n, n]; returns [m, n, d] in h's type.
    """
    mixed = torch.bmm(comb.transpose(1, 2), h.float())
    return torch.addcmul(mixed, post.unsqueeze(-1), x.float().unsqueeze(1)).type(h.dtype)


def hc_head_weights(mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float) -> torch.Tensor:
    """Weights of the streams at the end of the model. mixes: [m, n], scale: [1], base: [n]; returns [m, n]."""
    return torch.sigmoid(mixes * scale + base) + eps
