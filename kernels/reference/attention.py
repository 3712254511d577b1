"""Attention of many query heads over one shared latent that is key and value, with a learned sink per head.

The sink takes part in the denominator only. Probabilities are rounded to the type of the query before they meet the
values; scores, denominator and sums are float32 (DeepSeek-V4 reference, `sparse_attn`).
"""

from __future__ import annotations

import torch

from kernels.reference.constants import constant


def sparse_attention(
    q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, topk_idxs: torch.Tensor, scale: float
) -> torch.Tensor:
    """Each query attends to the rows of kv that its list names.

    q: [m, h, d], kv: [t, d], sink: [h] float32, topk_idxs: [m, j] (-1 is nothing). Returns [m, h, d] in q's type.
    """
    rows = kv[topk_idxs.clamp_min(0).long()].float()
    scores = torch.einsum("mhd,mjd->mhj", q.float(), rows) * scale
    scores = scores.masked_fill((topk_idxs < 0).unsqueeze(1), -torch.inf)
    probabilities, denominator = _softmax_with_sink(scores, sink, q.dtype)
    return (torch.einsum("mhj,mjd->mhd", probabilities, rows) / denominator).type(q.dtype)


def masked_attention(
    q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Each query attends to the rows of kv where its mask is true; None is everywhere.

    q: [m, h, d], kv: [t, d] float32, sink: [h] float32, mask: [m, t] bool. Returns [m, h, d] in q's type.
    """
    m, h, d = q.shape
    scores = (q.float().view(m * h, d) @ kv.T).view(m, h, -1).mul_(constant(scale, q.device))
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    probabilities, denominator = _softmax_with_sink(scores, sink, q.dtype)
    return ((probabilities.view(m * h, -1) @ kv).view(m, h, d) / denominator).type(q.dtype)


def _softmax_with_sink(
    scores: torch.Tensor, sink: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unnormalised probabilities [m, h, j], rounded to `dtype` but held in float32, and denominators [m, h, 1]."""
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top).exp_()
    denominator = (sink.unsqueeze(-1) - top).exp_().add_(exponentials.sum(-1, keepdim=True))
    return exponentials.type(dtype).float(), denominator
