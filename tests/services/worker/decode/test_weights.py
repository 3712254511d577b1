"""What decoding lays out anew of the model's weights, and that the model goes on with it."""

from __future__ import annotations

import pytest
import torch
from helpers import goldens

from services.worker.decode.weights import ROWS, StepWeights
from shared.config import PrefetchConfig


@pytest.mark.parametrize("guesses", [True, False])
def test_a_layers_gates_are_its_own_and_the_next_ones(monkeypatch: pytest.MonkeyPatch, guesses: bool) -> None:
    monkeypatch.setattr("kernels.dispatch._is_cuda", lambda value: True)  # weights as a GPU wants them
    model = goldens.load(exact=False).model
    before = [layer.moe.gate.clone() for layer in model.layers]
    weights = StepWeights.of(model, PrefetchConfig(look_ahead=guesses))
    experts = model.config.n_routed_experts
    rows = -(-experts // ROWS) * ROWS
    nothing = torch.zeros_like(before[0])
    for number, (layer, own) in enumerate(zip(weights.layers, before, strict=True)):
        following = [*before, nothing][number + 1]
        parts = layer.gates.split(rows)
        assert len(parts) == 1 + guesses
        assert all(part[:experts].equal(gate) for part, gate in zip(parts, (own, following), strict=False))
        assert not any(part[experts:].any() for part in parts)
        assert model.layers[number].moe.gate.equal(own)
        assert model.layers[number].moe.gate.data_ptr() == layer.gates.data_ptr(), "no second copy"


@pytest.mark.parametrize("hash_layers", [True, False])
def test_what_tokens_want_of_the_hash_layers(monkeypatch: pytest.MonkeyPatch, hash_layers: bool) -> None:
    monkeypatch.setattr("kernels.dispatch._is_cuda", lambda value: True)
    model = goldens.load(exact=False).model
    hashed = StepWeights.of(model, PrefetchConfig(hash_layers=hash_layers)).hashed
    config = model.config
    shape = config.num_hash_layers if hash_layers else 0, config.vocab_size, config.num_experts_per_tok
    assert (hashed.shape, hashed.dtype) == (shape, torch.int16)
    for table, layer in zip(hashed, model.layers, strict=False):
        assert table.long().equal(layer.moe.tid2eid)
