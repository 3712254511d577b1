"""Sampling against what its definition says, by exact probabilities and by long draws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.sampler import Sampler, SamplingParams, filtered_probabilities
from shared.errors import ServiceError

CPU = torch.device("cpu")
LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]))


def kept(params: SamplingParams) -> list[int]:
    return filtered_probabilities(LOGITS, params).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0, 1, 2, 3, 4]),
        (SamplingParams(top_k=2), [1, 3]),
        (SamplingParams(top_k=99), [0, 1, 2, 3, 4]),
        (SamplingParams(top_p=0.4), [1]),
        (SamplingParams(top_p=0.41), [1, 3]),
        (SamplingParams(top_p=0.001), [1]),
        (SamplingParams(top_p=1e-300), [1]),  # 0 in float32
        (SamplingParams(top_p=0.9), [0, 1, 3, 4]),
        (SamplingParams(min_p=0.5), [1, 3]),
        (SamplingParams(min_p=1.0), [1]),
        (SamplingParams(top_k=3, top_p=0.8), [1, 3]),  # of 0.85 in all, 0.8 is reached by the first two
    ],
)
def test_filters_keep(params, expected):
    assert kept(params) == expected


def test_greedy_ignores_the_seed():
    assert {Sampler(SamplingParams(temperature=0.0, seed=s), CPU).sample(LOGITS) for s in range(20)} == {1}


@pytest.mark.parametrize("temperature", [1e-5, 9e-6, 1e-38, 5e-324])
def test_next_to_zero_the_temperature_is_zero(temperature):
    """Quotients would be infinite."""
    sampler = Sampler(SamplingParams(temperature, seed=1), CPU)
    assert {sampler.sample(torch.tensor([1.0, 2.0, 30.0, 5.0])) for _ in range(20)} == {2}


def test_same_seed_same_ids_and_other_seed_other_ids():
    def draws(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed), CPU)
        return [sampler.sample(LOGITS) for _ in range(50)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(-1) != draws(-1)


def test_draws_follow_the_distribution():
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), CPU)
    counts = torch.bincount(torch.tensor([sampler.sample(LOGITS) for _ in range(20_000)]), minlength=5) / 20_000
    assert (counts - LOGITS.exp()).abs().max() < 0.015


@given(st.floats(0.05, 5.0), st.floats(0.05, 1.0), st.integers(0, 12), st.floats(0.0, 1.0), st.integers(0, 10_000))
def test_the_most_likely_token_is_never_excluded(temperature, top_p, top_k, min_p, seed):
    logits = torch.randn(11, generator=torch.Generator().manual_seed(seed))
    probabilities = filtered_probabilities(logits, SamplingParams(temperature, top_p, top_k, min_p))
    assert probabilities[logits.argmax()] > 0
    assert math.isfinite(float(probabilities.sum()))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=-1.0),
        SamplingParams(temperature=math.nan),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.5),
        SamplingParams(top_k=-1),
        SamplingParams(top_k=2**31),
        SamplingParams(min_p=2.0),
        SamplingParams(seed=2**63),
    ],
)
def test_values_out_of_range_are_refused_by_name(params):
    name = next(
        f
        for f in ("temperature", "top_p", "top_k", "min_p", "seed")
        if getattr(params, f) != getattr(SamplingParams(), f)
    )
    with pytest.raises(ServiceError, match=name):
        params.check()
