"""Attention over lists against recorded vectors, the formula in double precision and hostile lists."""

from __future__ import annotations

import pytest
import torch
from helpers import op_goldens
from helpers.matrices import CUDA, near, normal, twice

import kernels

SHAPES = [(64, 512), (16, 192), (4, 128)]


def _lists(seed: int, m: int, j: int, t: int) -> torch.Tensor:
    """Any rows, some of them more than once, a quarter of the places empty."""
    generator = torch.Generator().manual_seed(seed)
    lists = torch.randint(t, (m, j), generator=generator, dtype=torch.int32)
    lists[torch.rand(m, j, generator=generator) < 0.25] = -1
    lists[:, j // 2] = 0
    return lists.to(CUDA)


def _expected(q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, lists: torch.Tensor, scale: float) -> torch.Tensor:
    rows = kv.double()[lists.clamp_min(0).long()]
    scores = torch.einsum("mhd,mjd->mhj", q.double(), rows) * scale
    scores = scores.masked_fill((lists < 0).unsqueeze(1), -torch.inf)
    with_sink = torch.cat((scores, sink.double().view(1, -1, 1).expand(len(q), -1, 1)), -1)
    return torch.einsum("mhj,mjd->mhd", with_sink.softmax(-1)[..., :-1], rows)


@pytest.mark.parametrize("name", op_goldens.names("sparse_attn"))
def test_recorded(name: str) -> None:
    op_goldens.check_attention(name, CUDA)


@pytest.mark.parametrize(("h", "d"), SHAPES)
def test_random_lists(h: int, d: int) -> None:
    kv, sink = normal(0, 700, d).bfloat16(), 2 * normal(1, h)
    for m, j in ((0, 5), (1, 1), (2, 31), (7, 32), (64, 33), (65, 640), (513, 65)):
        q, lists = normal(2, m, h, d).bfloat16(), _lists(3, m, j, 700)
        o = twice(lambda q=q, lists=lists: kernels.sparse_attention(q, kv, sink, lists, d**-0.5))
        near(o, _expected(q, kv, sink, lists, d**-0.5), 4e-3)
        if m > 2:
            alone = kernels.sparse_attention(q[1:2], kv, sink, lists[1:2], d**-0.5)
            assert torch.equal(alone, o[1:2]), "a query's bits depend on the others"


@pytest.mark.parametrize(("h", "d"), SHAPES)
def test_empty_stretches(h: int, d: int) -> None:
    """Stretches of a list without a row, before and behind those with one; a whole list without any gives zeros."""
    kv, sink, q = normal(0, 50, d).bfloat16(), normal(1, h), normal(2, 3, h, d).bfloat16()
    lists = torch.full((3, 160), -1, dtype=torch.int32, device=CUDA)
    lists[0, 100], lists[1, 3] = 7, 49
    o = twice(lambda: kernels.sparse_attention(q, kv, sink, lists, d**-0.5))
    near(o[:2], _expected(q[:2], kv, sink, lists[:2], d**-0.5), 4e-3)
    assert (o[2] == 0).all()


def test_large_scores_and_sinks() -> None:
    """Scores of ten thousands, a hundredth uncertain in float32: the softmax picks one row, or the sink."""
    kv, q = normal(0, 90, 128).bfloat16(), (1000 * normal(1, 5, 4, 128)).bfloat16()
    sink = torch.tensor([1e4, -1e4, 0.0, 3e4], device=CUDA)
    lists = _lists(2, 5, 90, 90)
    o = kernels.sparse_attention(q, kv, sink, lists, 1.0)
    near(o, _expected(q, kv, sink, lists, 1.0), 2e-2)


def test_float32_is_exact() -> None:
    q, kv, sink, lists = normal(0, 9, 4, 128), normal(1, 60, 128), normal(2, 4), _lists(3, 9, 40, 60)
    near(kernels.sparse_attention(q, kv, sink, lists, 0.1), _expected(q, kv, sink, lists, 0.1), 1e-6)
