"""The transformers library against ours on a GPU, at the published model's width: a layer of every kind, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.local_experts import LocalExperts
from services.worker.model import Model
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.synth import SynthOptions, synthesise

transformers_model = pytest.importorskip(
    "benchmarks.transformers_model", reason="needs transformers with DeepSeek-V4", exc_type=ImportError
)
pytestmark = pytest.mark.timeout(600)

DEVICE = torch.device("cuda")
LAYERS, EXPERTS = 4, 8
PREFILL, DECODE = 2100, 3
"""More than 512 entries of four tokens, so that the indexer has to choose."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("full") / "checkpoint"
    synthesise(out, SynthOptions("full", LAYERS, EXPERTS))
    return out


@torch.inference_mode()
def test_prefill_and_decode_at_full_width(checkpoint: Path) -> None:
    """Theirs runs on the CPU, all tokens at once. Sums of float32 go in another order; TF32 would be far off."""
    config, index = ModelConfig.from_dir(checkpoint), TensorIndex.open(checkpoint)
    assert set(config.compress_ratios) == {0, 4, 128}
    assert config.num_hash_layers < LAYERS
    model = Model.load(index, config, PREFILL + DECODE, device=DEVICE, exact=True)
    experts, state = LocalExperts(index, config, 1 << 30, DEVICE), model.new_state(PREFILL + DECODE)
    ids = torch.randint(config.vocab_size, (PREFILL + DECODE,), generator=torch.Generator().manual_seed(1))
    steps = ids.split([PREFILL] + [1] * DECODE)
    mine = torch.stack([model.forward(state, part.tolist(), experts) for part in steps]).cpu()
    other = transformers_model.load_transformers(checkpoint, torch.float32)
    theirs = other(ids[None], use_cache=False, logits_to_keep=DECODE + 1).logits[0]
    worst = float((mine - theirs).abs().max() / theirs.std())
    assert worst <= 3e-4, worst
