"""Chooses the experts of each token, by score or by token id, and their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference.linear import float_linear


def router_scores(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(x @ gate^T)) in float32, [m, experts]. x: [m, d], gate: [experts, d], as for `float_linear`."""
    return F.softplus(float_linear(x, gate)).sqrt()


def route_by_score(scores: torch.Tensor, bias: torch.Tensor, topk: int) -> torch.Tensor:
    """topk_ids [m, topk]: the best of scores + bias, best first, of equals the lowest id.

    The bias balances load and takes no part in the weights.
    """
    return (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :topk]


def route_by_hash(token_ids: torch.Tensor, tid2eid: torch.Tensor) -> torch.Tensor:
    """topk_ids [m, topk] of token ids [m], from the table [vocab, topk]."""
    return tid2eid[token_ids]


def topk_weights(scores: torch.Tensor, topk_ids: torch.Tensor, scaling: float) -> torch.Tensor:
    """The chosen experts' scores, normalised to sum to `scaling`. scores: [m, experts]; returns [m, topk] float32."""
    chosen = scores.gather(-1, topk_ids)
    return chosen / chosen.sum(-1, keepdim=True) * scaling
