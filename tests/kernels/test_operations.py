"""Norms, pooling, indexer, router, gated activation, Hadamard and hyper-connections by their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels

SEEDS = st.integers(0, 2**31)


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_rounds_once() -> None:
    x, weight = _normal(0, 7, 96).bfloat16(), _normal(1, 96)
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    got = kernels.rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16
    assert (got == y.float().bfloat16()).float().mean() > 0.99, "up to ties that float32 decides otherwise"
    assert torch.allclose(kernels.rms_norm(x.float(), weight, 1e-6).double(), y, rtol=1e-5, atol=1e-6)


def test_rms_norm_eps_counts() -> None:
    assert torch.allclose(kernels.rms_norm(torch.full((1, 4), 1e-3), torch.ones(4), 1e-6), torch.tensor(0.5**0.5))


def test_head_norm_rounds_at_every_step() -> None:
    q = _normal(2, 5, 3, 64).bfloat16()
    mean = q.square().mean(-1, keepdim=True)
    assert mean.dtype == torch.bfloat16
    assert torch.equal(kernels.head_norm(q, 1e-6), q * (mean + 1e-6).float().rsqrt().bfloat16())
    exact = q.float() / (q.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (kernels.head_norm(q, 1e-6).float() - exact).abs().max() < 0.05


def test_compress_weighs_each_channel_alone() -> None:
    kv, gate = _normal(3, 2, 5, 4), 3 * _normal(4, 2, 5, 4)
    got = kernels.compress(kv, gate)
    for n in range(2):
        for c in range(4):
            weights = [math.exp(g) for g in gate[n, :, c].tolist()]
            mean = sum(w * v for w, v in zip(weights, kv[n, :, c].tolist(), strict=True)) / sum(weights)
            assert abs(float(got[n, c]) - mean) < 1e-5


def test_compress_overlapping_takes_the_first_half_of_the_group_before() -> None:
    kv, gate = _normal(5, 4, 4, 6), _normal(6, 4, 4, 6)
    got = kernels.compress_overlapping(kv, gate)
    for j in range(3):
        pooled_kv = torch.cat((kv[j, :, :3], kv[j + 1, :, 3:]))
        pooled_gate = torch.cat((gate[j, :, :3], gate[j + 1, :, 3:]))
        assert torch.allclose(got[j], (pooled_gate.softmax(0) * pooled_kv).sum(0), atol=1e-6)


def test_compress_overlapping_without_a_group_before() -> None:
    kv, gate = _normal(7, 2, 4, 6), _normal(8, 2, 4, 6)
    kv[0], gate[0] = 0, -torch.inf
    assert torch.allclose(kernels.compress_overlapping(kv, gate), kernels.compress(kv[1:, :, 3:], gate[1:, :, 3:]))


def test_index_scores() -> None:
    q, k, weights = _normal(9, 3, 4, 8).bfloat16(), _normal(10, 5, 8).bfloat16(), _normal(11, 3, 4).bfloat16()
    got = kernels.index_scores(q, k, weights)
    expected = torch.einsum("mht,mh->mt", torch.einsum("mhd,td->mht", q.double(), k.double()).relu(), weights.double())
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), expected, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 12), st.integers(1, 12))
def test_index_topk_keeps_the_best_of_the_visible(seed: int, entries: int, topk: int) -> None:
    scores = _normal(seed, 4, entries)
    visible = torch.arange(entries) < torch.randint(entries + 1, (4, 1), generator=torch.Generator().manual_seed(seed))
    kept = kernels.index_topk(scores, visible, topk)
    for row in range(4):
        seen = [j for j in range(entries) if visible[row, j]]
        best = sorted(seen, key=lambda j: -float(scores[row, j]))[:topk]
        assert kept[row].nonzero().flatten().tolist() == sorted(best)


def test_router_scores_are_linear_above_twenty() -> None:
    x, gate = torch.tensor([[1.0]]), torch.tensor([[-30.0], [0.0], [5.0], [25.0], [400.0]])
    expected = [math.sqrt(math.log1p(math.exp(v))) for v in (-30.0, 0.0, 5.0)] + [5.0, 20.0]
    assert kernels.router_scores(x, gate)[0].tolist() == pytest.approx(expected, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_bias_chooses_and_does_not_weigh(seed: int) -> None:
    scores, bias = _normal(seed, 6, 10).abs() + 0.1, _normal(seed + 1, 10)
    ids = kernels.route_by_score(scores, bias, 3)
    weights = kernels.topk_weights(scores, ids, 1.5)
    for row in range(6):
        best = sorted(range(10), key=lambda e: -float(scores[row, e] + bias[e]))[:3]
        assert set(ids[row].tolist()) == set(best)
        total = sum(float(scores[row, e]) for e in best)
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            assert weight == pytest.approx(1.5 * float(scores[row, expert]) / total, rel=1e-5)


def test_hash_route_is_the_tables_row() -> None:
    table = torch.tensor([[3, 1], [0, 2], [2, 3]])
    assert kernels.route_by_hash(torch.tensor([2, 0, 2]), table).tolist() == [[2, 3], [3, 1], [2, 3]]


def test_swiglu_clamps_gate_above_and_up_on_both_sides() -> None:
    gate = torch.tensor([[-20.0, -1.0, 1.0, 20.0, 1.0, 1.0]])
    up = torch.tensor([[1.0, 1.0, 1.0, 1.0, 20.0, -20.0]])

    def silu(v: float) -> float:
        return v / (1 + math.exp(-v))

    expected = [silu(-20.0), silu(-1.0), silu(1.0), silu(7.0), 7 * silu(1.0), -7 * silu(1.0)]
    got = kernels.swiglu(gate, up, 7.0, None, torch.float32)
    assert got[0].tolist() == pytest.approx(expected, rel=1e-5)
    weighted = kernels.swiglu(gate, up, 7.0, torch.tensor([0.25]), torch.float32)
    assert torch.equal(weighted, got * 0.25)


def test_swiglu_rounds_once_after_the_weight() -> None:
    gate, up, weights = _normal(12, 4, 32).bfloat16(), _normal(13, 4, 32).bfloat16(), _normal(14, 4).abs()
    exact = kernels.swiglu(gate, up, 10.0, weights, torch.float32)
    assert torch.equal(kernels.swiglu(gate, up, 10.0, weights, torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_hadamard_is_sylvesters(n: int) -> None:
    signs = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    expected = torch.tensor(signs, dtype=torch.float32) * n**-0.5
    assert torch.allclose(kernels.hadamard(torch.eye(n)), expected, atol=1e-7)


def test_hc_mixes_normalise_after_projecting() -> None:
    h, fn = _normal(15, 3, 4, 16).bfloat16(), _normal(16, 24, 64)
    v = h.double().flatten(1)
    expected = v @ fn.double().T / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(kernels.hc_mixes(h, fn, 1e-6).double(), expected, rtol=1e-5, atol=1e-5)


def test_sinkhorn_gives_doubly_stochastic_mixing() -> None:
    mixes, scale, base = _normal(17, 6, 24), torch.tensor([1.0, 2.0, 0.5]), _normal(18, 24)
    pre, post, comb = kernels.hc_split_sinkhorn(mixes, scale, base, 4, 20, 1e-6)
    assert torch.allclose(comb.sum(1), torch.ones(6, 4), atol=1e-4)
    assert torch.allclose(comb.sum(2), torch.ones(6, 4), atol=1e-4)
    assert torch.allclose(pre, torch.sigmoid(mixes[:, :4] * 1.0 + base[:4]) + 1e-6)
    assert torch.allclose(post, 2 * torch.sigmoid(mixes[:, 4:8] * 2.0 + base[4:8]))
    alone = [kernels.hc_split_sinkhorn(mixes[i : i + 1], scale, base, 4, 20, 1e-6)[2] for i in range(6)]
    assert (torch.cat(alone) - comb).abs().max() < 1e-6, "a single token goes another way to the same result"


def test_hc_pre_and_post() -> None:
    h, x = _normal(19, 3, 4, 8).bfloat16(), _normal(20, 3, 8).bfloat16()
    pre, post, comb = _normal(21, 3, 4), _normal(22, 3, 4), _normal(23, 3, 4, 4)
    read = kernels.hc_pre(h, pre)
    assert read.dtype == torch.bfloat16
    assert torch.allclose(read.double(), torch.einsum("mj,mjd->md", pre.double(), h.double()), rtol=0.01, atol=0.01)
    written = kernels.hc_post(x, h, post, comb)
    mixed = torch.einsum("mjk,mjd->mkd", comb.double(), h.double())
    expected = post.double().unsqueeze(-1) * x.double().unsqueeze(1) + mixed
    assert written.dtype == torch.bfloat16
    assert torch.allclose(written.double(), expected, rtol=0.01, atol=0.01)


def test_hc_head_weights() -> None:
    mixes, scale, base = _normal(24, 3, 4), torch.tensor([0.5]), _normal(25, 4)
    got = kernels.hc_head_weights(mixes, scale, base, 1e-6)
    assert torch.allclose(got, torch.sigmoid(mixes * 0.5 + base) + 1e-6)
