"""A second opinion: the transformers library with the same weights, in float32, prefill and decode with its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import goldens
from transformers import DynamicCache

from benchmarks.transformers_model import load_transformers

CLOSE = 1e-4


@pytest.fixture(scope="module")
def other() -> Any:
    return load_transformers(goldens.TINY_A, torch.float32)


@pytest.mark.parametrize("seed", [1, 2])
def test_prefill_and_decode_of_random_tokens(other: Any, seed: int) -> None:
    ids = torch.randint(512, (300,), generator=torch.Generator().manual_seed(seed))
    setup, prefill = goldens.shared("exact"), 261
    state, cache = setup.new_state(), DynamicCache(config=other.config)
    mine: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    with torch.inference_mode():
        for part in ids.split([prefill] + [1] * (len(ids) - prefill)):
            theirs.append(other(part[None], cache=cache, use_cache=True).logits[0, -1])
            mine.append(setup.model.forward(state, part.tolist(), setup.experts))
    assert (torch.stack(mine) - torch.stack(theirs)).abs().max() < CLOSE
