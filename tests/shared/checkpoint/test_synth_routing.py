"""The skew: expert use of a random model follows the law that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from shared.checkpoint.synth_routing import MAX_USE, hash_table, router_bias, zipf_use

TOKENS = 20_000


def exponent_of(use: np.ndarray) -> float:
    """Slope of log use over log rank, without the few capped ranks at the head and the noisy tail."""
    ranks = np.arange(4, len(use) // 2 + 1)
    return float(-np.polyfit(np.log(ranks), np.log(use[ranks - 1]), 1)[0])


def use_of(chosen: np.ndarray, experts: int) -> np.ndarray:
    return np.sort(np.bincount(chosen.ravel(), minlength=experts) / len(chosen))[::-1]


@pytest.mark.parametrize(("experts", "per_tok"), [(256, 6), (32, 4)])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.4])
def test_biases_and_hash_tables_give_the_law(experts: int, per_tok: int, exponent: float) -> None:
    rng = np.random.default_rng(1)
    law = zipf_use(experts, per_tok, exponent)
    scores = np.sqrt(np.logaddexp(0, rng.standard_normal((TOKENS, experts)))) + router_bias(rng, law)
    routed = use_of(np.argpartition(-scores, per_tok, axis=1)[:, :per_tok], experts)
    hashed = use_of(hash_table(rng, law, TOKENS, per_tok), experts)
    assert exponent_of(routed) == pytest.approx(exponent, abs=0.08)
    assert exponent_of(hashed) == pytest.approx(exponent, abs=0.08)


def test_the_law_sums_to_the_experts_per_token_and_is_capped() -> None:
    for exponent in (0.0, 1.0, 3.0):
        law = zipf_use(64, 6, exponent)
        assert law.sum() == pytest.approx(6)
        assert law.max() <= MAX_USE + 1e-9
        assert (np.diff(law) <= 1e-12).all()


def test_all_experts_active_is_even() -> None:
    assert zipf_use(4, 4, 1.0).tolist() == [1.0] * 4


def test_hash_rows_hold_distinct_experts() -> None:
    table = hash_table(np.random.default_rng(0), zipf_use(8, 4, 1.5), 5000, 4)
    assert (np.diff(table, axis=1) > 0).all()
    assert table.min() >= 0
    assert table.max() < 8
