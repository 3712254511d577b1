"""The model's output does not depend on the checkpoint's layout, and synthetic weights keep it finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import tiny_checkpoint

from services.worker.local_experts import LocalExperts
from services.worker.model.model import Model
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.pack import pack
from shared.checkpoint.synth import SynthOptions, synthesise

PROMPT = [(7 * i) % 500 for i in range(40)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products: more threads only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(directory: Path, prompt: list[int]) -> torch.Tensor:
    """After the prompt and after each of four more ids, float32 [5, vocab]."""
    config, index = ModelConfig.from_dir(directory), TensorIndex.open(directory)
    model, experts = Model.load(index, config, max_context=256), LocalExperts(index, config, 1 << 20)
    state = model.new_state(256)
    rows = [model.forward(state, prompt, experts)]
    rows += [model.forward(state, [token], experts) for token in (5, 50, 150, 499)]
    return torch.stack(rows)


def test_in_place_and_packed_give_the_same_bits(tmp_path: Path) -> None:
    pack(tiny_checkpoint(), tmp_path / "packed")
    assert torch.equal(logits_of(tiny_checkpoint(), PROMPT), logits_of(tmp_path / "packed", PROMPT))


@pytest.mark.parametrize("skew", [0.0, 1.2])
def test_activations_stay_finite_through_many_layers(tmp_path: Path, skew: float) -> None:
    synthesise(tmp_path / "deep", SynthOptions("tiny", layers=16, experts=4, skew=skew))
    logits = logits_of(tmp_path / "deep", PROMPT)
    assert torch.isfinite(logits).all()
    assert 1 < logits.std().item() < 10
