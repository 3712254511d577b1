"""Scores compressed entries for a query and keeps the best: which of them the attention will see."""

from __future__ import annotations

import torch


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum over heads of relu(q . k) * weight. q: [m, h, d], k: [t, d], weights: [m, h]; returns [m, t] float32."""
    m, h, d = q.shape
    dots = (q.float().view(m * h, d) @ k.float().T).view(m, h, -1)
    return torch.bmm(weights.float().unsqueeze(1), dots.relu_()).squeeze(1)


def index_topk(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Which entries each query keeps: the best `topk` of the visible ones, of equals the first.

    scores: float32 [m, t]; visible and the result: bool [m, t].
    """
    if scores.shape[-1] <= topk:
        return visible
    best = scores.masked_fill(~visible, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return torch.zeros_like(visible).scatter_(-1, best, True) & visible
