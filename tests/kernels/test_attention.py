"""Attention with a sink by its formula: the sink takes probability and gives nothing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _expected(q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, rows: list[int], scale: float) -> torch.Tensor:
    """One query [h, d] in double precision: softmax over rows and sink, the sink's value being zero."""
    keys = kv.double()[rows]
    scores = torch.cat((q.double() @ keys.T * scale, sink.double().unsqueeze(1)), 1)
    return scores.softmax(-1)[:, :-1] @ keys


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 40))
def test_lists_and_masks_give_the_formula(seed: int, m: int, t: int) -> None:
    q, kv, sink = _normal(seed, m, 3, 16), _normal(seed + 1, t, 16), 2 * _normal(seed + 2, 3)
    mask = _normal(seed + 3, m, t) > 0
    mask[:, 0] = True
    lists = torch.full((m, t), -1)
    for row in range(m):
        seen = mask[row].nonzero().flatten()
        lists[row, t - len(seen) :] = seen
    by_list = kernels.sparse_attention(q, kv, sink, lists, 0.25)
    by_mask = kernels.masked_attention(q, kv, sink, mask, 0.25)
    for row in range(m):
        expected = _expected(q[row], kv, sink, mask[row].nonzero().flatten().tolist(), 0.25)
        assert torch.allclose(by_list[row].double(), expected, atol=1e-5)
        assert torch.allclose(by_mask[row].double(), expected, atol=1e-5)


def test_no_mask_is_a_full_mask() -> None:
    q, kv, sink = _normal(0, 2, 3, 16), _normal(1, 9, 16), _normal(2, 3)
    everywhere = kernels.masked_attention(q, kv, sink, torch.ones(2, 9, dtype=torch.bool), 0.25)
    assert torch.equal(kernels.masked_attention(q, kv, sink, None, 0.25), everywhere)


def test_large_scores_do_not_overflow() -> None:
    q, kv, sink = 1e4 * _normal(3, 1, 2, 16), _normal(4, 5, 16), torch.tensor([100.0, -100.0])
    assert kernels.masked_attention(q, kv, sink, None, 1.0).isfinite().all()


def test_probabilities_meet_values_in_the_querys_type() -> None:
    """In bfloat16 the probabilities are rounded, but the denominator is not."""
    q, kv, sink = _normal(5, 1, 2, 64).bfloat16(), _normal(6, 30, 64).bfloat16().float(), _normal(7, 2)
    scores = torch.einsum("hd,td->ht", q[0].float(), kv) * 0.125
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    denominator = p.sum(-1, keepdim=True) + (sink.unsqueeze(-1) - top).exp()
    expected = (p.bfloat16().float() @ kv / denominator).bfloat16()
    got = kernels.masked_attention(q, kv, sink, None, 0.125)[0]
    assert got.dtype == torch.bfloat16
    assert (got == expected).float().mean() > 0.98
