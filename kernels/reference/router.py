"""Chooses the experts of each token, by score or by token id, and their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def router_scores(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(x @ gate^T)) in float32. x: [m, d], gate: [experts, d] float32; returns [m, experts]."""
    return F.softplus(F.linear(x.float(), gate)).sqrt()


def route_by_score(scores: torch.Tensor, bias: torch.Tensor, topk: int) -> torch.Tensor:
    """topk_ids [m, topk]: the best of scores + bias; the bias balances load and takes no part in the weights."""
    return (scores + bias).topk(topk, dim=-1).indices


def route_by_hash(token_ids: torch.Tensor, tid2eid: torch.Tensor) -> torch.Tensor:
    """topk_ids [m, topk] of token ids [m], from the table [vocab, topk]."""
    return tid2eid[token_ids]


def topk_weights(scores: torch.Tensor, topk_ids: torch.Tensor, scaling: float) -> torch.Tensor:
    """The chosen experts' scores, normalised to sum to `scaling`. scores: [m, experts]; returns [m, topk] float32."""
    chosen = scores.gather(-1, topk_ids)
    return chosen / chosen.sum(-1, keepdim=True) * scaling
