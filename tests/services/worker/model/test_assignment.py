"""A router's decision, turned round: every token reaches its experts once, with its weight, and comes back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.model.assignment import Assignment


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), m=st.integers(1, 9), k=st.integers(1, 4))
def test_weighted_sum_is_that_of_a_loop(seed: int, m: int, k: int) -> None:
    """Values are small whole numbers, so the sums are exact in any order."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(6, generator=g)[:k] for _ in range(m)])
    weights = torch.randint(1, 9, (m, k), generator=g).float()
    x = torch.randint(-8, 8, (m, 3), generator=g).float()
    assignment = Assignment(ids, weights)
    assert list(assignment.experts) == sorted(set(ids.flatten().tolist()))
    total = torch.zeros(m, 3)
    for expert in assignment.experts:
        rows, routing = assignment.rows(x, expert), assignment.weights(expert)
        assert len(rows) == len(routing) == int((ids == expert).sum())
        assignment.add(total, expert, rows * routing.unsqueeze(-1) * (expert + 1))
    expected = x * (weights * (ids + 1)).sum(-1, keepdim=True)
    assert torch.equal(total, expected)
