"""Manifold-constrained hyper-connections: n residual streams, mixed by matrices that Sinkhorn makes doubly stochastic.

Source: https://arxiv.org/abs/2512.24880 and the DeepSeek-V4 reference, `hc_split_sinkhorn`.
"""

from __future__ import annotations

import functools
from operator import mul

import torch
import torch.nn.functional as F

from kernels.reference.constants import constant
from kernels.reference.rms_norm import inverse_rms


def hc_mixes(h: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """The projection of all streams that sets the mixing. h: [m, n, d]; fn: [k, n * d] float32; returns [m, k]."""
    v = h.flatten(1).to(torch.float32)
    return F.linear(v, fn).mul_(inverse_rms(v, eps))


def hc_split_sinkhorn(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixes: [m, (2 + n) * n], scale: [3], base: [(2 + n) * n], float32.

    Returns pre [m, n] (sigmoid + eps), post [m, n] (2 * sigmoid) and comb [m, n, n]: softmax rows, then `iterations`
    column normalisations with a row normalisation between each two.
    """
    scaled = torch.addcmul(base, mixes, scale.index_select(0, _parts(n)))
    gates = scaled[:, : 2 * n].sigmoid()
    comb = scaled[:, 2 * n :].view(-1, n, n).softmax(-1).add_(constant(eps))
    normalise = _sinkhorn_of_one if len(mixes) == 1 else _sinkhorn
    return gates[:, :n] + constant(eps), gates[:, n:] * constant(2.0), normalise(comb, iterations, eps)


@functools.cache
def _parts(n: int) -> torch.Tensor:
    """Which of the three scales each of the mixes has."""
    return torch.tensor([0] * n + [1] * n + [2] * n * n)


def _sinkhorn(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


def _sinkhorn_of_one(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """The same for one small matrix: arithmetic on a few floats is faster than the dispatch of 100 operations.

    Only the factors of rows and columns are iterated: the matrix stays diag(rows) * comb * diag(columns).
    """
    matrix = comb[0].tolist()
    transposed = list(zip(*matrix, strict=True))
    rows = [1.0] * len(matrix)
    columns = _renormalised([1.0] * len(matrix), rows, transposed, eps)
    for _ in range(iterations - 1):
        rows = _renormalised(rows, columns, matrix, eps)
        columns = _renormalised(columns, rows, transposed, eps)
    return comb * torch.tensor(rows).unsqueeze(-1) * torch.tensor(columns)


def _renormalised(
    factors: list[float], others: list[float], matrix: list[tuple[float, ...]], eps: float
) -> list[float]:
    """Factors f / (sum + eps), where f * (vector . others) is the sum over a line of the scaled matrix."""
    return [f / (f * sum(map(mul, line, others)) + eps) for f, line in zip(factors, matrix, strict=True)]


def hc_pre(h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The sublayer's input: sum of the streams, weighted. h: [m, n, d], pre: [m, n]; returns [m, d] in h's type."""
    return torch.bmm(pre.unsqueeze(1), h.to(torch.float32)).squeeze(1).to(h.dtype)


def hc_post(x: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer: h'[k] = post[k] * x + sum over j of comb[j, k] * h[j].

    x: [m, d], h: [m, n, d], post: [m, n], comb: [m, n, n]; returns [m, n, d] in h's type.
    """
    mixed = torch.bmm(comb.transpose(1, 2), h.to(torch.float32))
    return torch.addcmul(mixed, post.unsqueeze(-1), x.to(torch.float32).unsqueeze(1)).to(h.dtype)


def hc_head_weights(mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float) -> torch.Tensor:
    """Weights of the streams at the end of the model. mixes: [m, n], scale: [1], base: [n]; returns [m, n]."""
    return torch.sigmoid(mixes * scale + base) + eps
