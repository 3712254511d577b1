"""Experts a wave at a time give the bits of experts one by one, on the twins of the kernels."""

from __future__ import annotations

import pytest
import torch
from helpers import goldens

from services.worker.model import moe
from services.worker.model.grouped import GroupedExperts


def _logits() -> torch.Tensor:
    setup = goldens.shared("quantised")
    state, ids = setup.new_state(), goldens.token_ids()
    rows = [setup.model.forward(state, ids[:40], setup.experts)]
    rows += [setup.model.forward(state, [token], setup.experts) for token in ids[40:43]]
    return torch.stack(rows)


@pytest.mark.parametrize("wave", [1, 5, 32])
def test_same_bits_in_any_waves(wave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = _logits()
    monkeypatch.setattr(moe, "SeparateExperts", GroupedExperts)
    monkeypatch.setattr(moe, "WAVE", wave)
    assert torch.equal(_logits(), one_by_one)
