"""Quantised half layers, each fed with its recorded input: outputs, caches, the indexer's choice, router and head."""

from __future__ import annotations

import pytest
from helpers import goldens

LAYERS = range(6)


@pytest.mark.parametrize("layer", LAYERS)
def test_attention_half(layer: int) -> None:
    goldens.check_attention_half(goldens.shared("quantised"), layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_expert_half(layer: int) -> None:
    goldens.check_expert_half(goldens.shared("quantised"), layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_router(layer: int) -> None:
    goldens.check_router(goldens.shared("quantised"), layer)


def test_head() -> None:
    goldens.check_head(goldens.shared("quantised"))


def test_mtp_block() -> None:
    goldens.check_mtp_block(goldens.shared("quantised"))
