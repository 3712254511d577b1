"""Skewed expert use for synthetic checkpoints: which biases and hash tables make a Zipf law come out.

Owns the probability side only: the router scores of a random model are taken as known (`sqrt(softplus(x))` of a
standard normal x, which unit-variance inputs and weights of variance 1/hidden_size give). Does no I/O.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

# No expert is chosen for more than this part of the tokens, however steep the law: a certain expert would need an
# infinite bias.
MAX_USE = 0.95

_TOKENS_AT_A_TIME = 4096


def zipf_use(experts: int, experts_per_tok: int, exponent: float) -> NDArray[np.float64]:
    """The probability, by rank, that a token uses an expert: proportional to rank^-exponent, experts_per_tok in all.

    Where that would exceed `MAX_USE` the head of the law is flat. Shape [experts], descending.
    """
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    if experts_per_tok >= MAX_USE * experts:
        return np.full(experts, experts_per_tok / experts)
    low, high = 0.0, experts_per_tok / weights.min()
    for _ in range(200):
        middle = (low + high) / 2
        too_much = np.minimum(MAX_USE, middle * weights).sum() > experts_per_tok
        low, high = (low, middle) if too_much else (middle, high)
    return np.minimum(MAX_USE, low * weights)


def router_bias(rng: np.random.Generator, use: NDArray[np.float64]) -> NDArray[np.float32]:
    """The selection bias [experts] under which top-k of score plus bias picks expert e with probability use[rank of e].

    Ranks are dealt at random. An expert is picked when its score exceeds a threshold t minus its bias, so its bias is
    t minus the (1 - use) quantile of the scores; t shifts all alike and is chosen to make the mean zero.
    """
    quantiles = np.array([_score_quantile(1 - p) for p in use])
    bias = quantiles.mean() - quantiles
    return rng.permutation(bias).astype(np.float32)


def hash_table(rng: np.random.Generator, use: NDArray[np.float64], vocab_size: int, top_k: int) -> NDArray[np.int64]:
    """Distinct experts for every token id, ascending, [vocab_size, top_k]; expert e is in about use[its rank] of them.

    Each row is a race: expert e arrives after an exponential time of rate -log(1 - use), so that it is there by time 1
    with probability `use`; the first top_k win.
    """
    rates = rng.permutation(-np.log1p(-np.minimum(use, MAX_USE)))
    table = np.empty((vocab_size, top_k), dtype=np.int64)
    for start in range(0, vocab_size, _TOKENS_AT_A_TIME):
        rows = table[start : start + _TOKENS_AT_A_TIME]
        arrivals = rng.standard_exponential((len(rows), len(rates))) / rates
        rows[:] = np.sort(np.argpartition(arrivals, top_k - 1, axis=1)[:, :top_k], axis=1)
    return table


def _score_quantile(p: float) -> float:
    x = NormalDist().inv_cdf(min(max(p, 1e-9), 1 - 1e-9))
    return float(np.sqrt(np.logaddexp(0.0, x)))
