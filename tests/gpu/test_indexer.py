"""Scores of entries against double precision; the choice of the best is the twin's, ties included."""

from __future__ import annotations

import pytest
import torch
from helpers.matrices import CUDA, near, normal, twice

import kernels
from kernels import reference


@pytest.mark.parametrize(("h", "d"), [(64, 128), (16, 64)])
def test_scores(h: int, d: int) -> None:
    for m, t in ((0, 9), (1, 0), (1, 1), (2, 127), (7, 128), (8, 129), (9, 1000), (513, 300)):
        q, k = normal(0, m, h, d).bfloat16(), normal(1, t, d).bfloat16()
        weights = normal(2, m, h).bfloat16()
        scores = twice(lambda q=q, k=k, w=weights: kernels.index_scores(q, k, w))
        dots = torch.einsum("mhd,td->mht", q.double(), k.double()).relu()
        near(scores, torch.einsum("mht,mh->mt", dots, weights.double()), 1e-5)
        if m > 2:
            assert torch.equal(kernels.index_scores(q[2:3], k, weights[2:3]), scores[2:3])


def test_choice_is_the_twins() -> None:
    """Many equal scores, also at the boundary."""
    scores = (normal(0, 40, 300) * 2).round()
    visible = (torch.arange(300) < torch.arange(40).unsqueeze(1) * 8).to(CUDA)
    got = kernels.index_topk(scores, visible, 64)
    assert torch.equal(got.cpu(), reference.index_topk(scores.cpu(), visible.cpu(), 64))
    assert torch.equal(got.sum(1), visible.sum(1).clamp_max(64))
