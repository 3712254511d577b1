"""Scores of entries against double precision; the choice of the best is the twin's, bit for bit."""

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


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "negative", "subnormal"])
@pytest.mark.parametrize(("m", "t", "topk"), [(0, 40, 16), (3, 16, 16), (5, 17, 16), (40, 300, 64), (9, 5000, 512)])
def test_choice_is_the_twins(m: int, t: int, topk: int, kind: str) -> None:
    """Equal scores, also at the boundary; from none visible, by fewer than are kept, to all."""
    scores = normal(0, m, t)
    scores = {
        "random": scores,
        "ties": (scores * 2).round(),
        "equal": scores * 0,
        "negative": -scores.abs(),
        "subnormal": scores * 1e-40,
    }[kind]
    visible = torch.arange(t) < torch.linspace(0, t, m).long().unsqueeze(1)
    holes = torch.rand(m, t, generator=torch.Generator().manual_seed(1)) < 0.5
    for seen in (visible, visible & holes):
        got = twice(lambda seen=seen: kernels.index_topk(scores, seen.to(CUDA), topk))
        assert torch.equal(got.cpu(), reference.index_topk(scores.cpu(), seen, topk))
