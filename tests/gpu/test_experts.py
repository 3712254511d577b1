"""Experts of a wave in one launch: against their twin, from slots far apart, in whatever company."""

from __future__ import annotations

import pytest
import torch
from helpers.matrices import CUDA, activations, near, normal, record

import kernels
from kernels import reference
from kernels.reference import ExpertRows

LIMIT = 10.0


class Batch:
    """Tokens and their experts, sorted by expert as `expert_mlp` wants them."""

    def __init__(self, m: int, experts: int, topk: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(m)
        ids = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(m)])
        order = ids.flatten().argsort(stable=True)
        self.x = activations(m, m, hidden)
        self.tokens = (order // topk).int().to(CUDA)
        self.routing = torch.rand(m * topk, generator=generator).to(CUDA)
        counts = torch.bincount(ids.flatten(), minlength=experts)
        ends = counts.cumsum(0)
        self.spans = list(zip((ends - counts).tolist(), ends.tolist(), strict=True))
        self.hidden = hidden

    def run(self, experts: list[ExpertRows], width: int, limit: float = LIMIT) -> torch.Tensor:
        out = torch.full((len(self.tokens), self.hidden), torch.nan, device=CUDA, dtype=torch.bfloat16)
        kernels.expert_mlp(self.x, self.tokens, self.routing, experts, width, limit, out)
        return out

    def twin(self, experts: list[ExpertRows], width: int, limit: float = LIMIT) -> torch.Tensor:
        out = torch.full((len(self.tokens), self.hidden), torch.nan, device=CUDA, dtype=torch.bfloat16)
        reference.expert_mlp(self.x, self.tokens, self.routing, experts, width, limit, out)
        return out


@pytest.mark.parametrize(("m", "hidden", "width"), [(1, 4096, 2048), (150, 4096, 2048), (1, 128, 128), (513, 128, 128)])
def test_against_the_twin(m: int, hidden: int, width: int) -> None:
    batch = Batch(m, 8, 6, hidden)
    experts = [ExpertRows(record(10 * i, hidden, width), *span) for i, span in enumerate(batch.spans)]
    experts = [expert for expert in experts if expert.end > expert.begin]
    got = batch.run(experts, width)
    near(got, batch.twin(experts, width).double(), 5e-3)
    assert torch.equal(got, batch.run(experts, width))
    one_by_one = torch.full_like(got, torch.nan)
    for expert in experts:
        alone = batch.run([expert], width)
        assert alone[: expert.begin].isnan().all()
        assert alone[expert.end :].isnan().all(), "rows of others were touched"
        one_by_one[expert.begin : expert.end] = alone[expert.begin : expert.end]
    assert torch.equal(got, one_by_one), "bits depend on the company"


def test_limit_acts() -> None:
    batch = Batch(40, 4, 2, 128)
    experts = [ExpertRows(record(10 * i, 128, 128), *span) for i, span in enumerate(batch.spans)]
    clamped = batch.run(experts, 128, 0.01)
    near(clamped, batch.twin(experts, 128, 0.01).double(), 5e-3)
    assert not torch.equal(clamped, batch.run(experts, 128))


def test_slots_beyond_four_gibibytes() -> None:
    batch = Batch(70, 4, 2, 128)
    records = [record(10 * i, 128, 128) for i in range(4)]
    pool = torch.empty((5 << 30) // (7 << 12), 7 << 12, dtype=torch.uint8, device=CUDA)
    slots = [0, len(pool) - 1, len(pool) // 2, 1]
    for slot, content in zip(slots, records, strict=True):
        pool[slot, : len(content)] = content
    near_by = batch.run([ExpertRows(r, *span) for r, span in zip(records, batch.spans, strict=True)], 128)
    far = batch.run([ExpertRows(pool[s], *span) for s, span in zip(slots, batch.spans, strict=True)], 128)
    assert torch.equal(near_by, far)


def test_nothing_to_do() -> None:
    batch = Batch(1, 4, 2, 128)
    assert batch.run([], 128).isnan().all()


@pytest.mark.parametrize(("m", "hidden", "topk"), [(0, 4096, 6), (1, 4096, 6), (513, 4096, 6), (7, 128, 4)])
def test_expert_sum(m: int, hidden: int, topk: int) -> None:
    """Bit for bit: the same additions in the same order."""
    rows, shared = normal(0, m * topk, hidden).bfloat16(), normal(1, m, hidden).bfloat16()
    places = torch.randperm(m * topk, generator=torch.Generator().manual_seed(2)).int().view(m, topk).to(CUDA)
    assert torch.equal(kernels.expert_sum(rows, places, shared), reference.expert_sum(rows, places, shared))
