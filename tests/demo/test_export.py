"""From `transformers`' names and values to the published ones, and back through Icebox's own loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo import export, model, quantise
from demo.corpus import HERE
from demo.mtp import MtpBlock
from demo.optimiser import Rounding, rounding_of
from services.worker.local_experts import LocalExperts
from services.worker.model import Model
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex

SMALL = {
    "vocab_size": 384,
    "num_hidden_layers": 5,
    "num_hash_layers": 2,
    "compress_ratios": [0, 4, 128, 4, 0, 0],
    "n_routed_experts": 6,
}


def test_a_random_model_means_the_same_in_both(tmp_path: Path) -> None:
    trained = model.build(3, model.config(**SMALL))
    block = MtpBlock(trained.config)
    block.start_from(trained.model.layers[-1], trained.model.hc_head, trained.model.norm)
    masters = dict(trained.state_dict()) | {f"mtp.{name}": t for name, t in block.state_dict().items()}
    masters = {name: t for name, t in masters.items() if "inv_freq" not in name}
    for name, tensor in masters.items():
        if tensor.is_floating_point():
            tensor.add_(0.05 * torch.randn_like(tensor))
            rounding = rounding_of(name)
            kept = "_hc." in name or "hc_head" in name or name.endswith(("sinks", "position_bias", "correction_bias"))
            tensor.copy_(rounding(tensor) if rounding else tensor if kept else tensor.bfloat16())
    export.write_checkpoint(masters, model.published() | SMALL, tmp_path / "out", HERE / "tokenizer.json")

    index, shape = TensorIndex.open(tmp_path / "out"), ModelConfig.from_dir(tmp_path / "out")
    ours = Model.load(index, shape, 400, exact=True)
    ids = torch.randint(0, 384, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = trained.eval()(ids[None], use_cache=False).logits[0, -1]
    logits = ours.forward(ours.new_state(400), ids.tolist(), LocalExperts(index, shape, 1 << 24))
    assert torch.linalg.norm(logits - theirs) < 1e-3 * torch.linalg.norm(theirs)


@pytest.mark.parametrize("rounded", [quantise.fp4_rounded, quantise.fp8_rounded])
def test_rounding_twice_changes_nothing(rounded: Rounding) -> None:
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(2)) * 0.1
    once = rounded(weight)
    assert torch.equal(rounded(once), once)
    assert torch.linalg.norm(once - weight) < 0.15 * torch.linalg.norm(weight)


def test_fp4_packs_the_even_element_low_and_ties_go_to_even_codes() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.5, -6.0] + [0.0] * 22)
    packed, scale = quantise.fp4_codes(values)
    assert scale.tolist() == [127]
    assert packed.view(torch.uint8)[:5].tolist() == [0x20, 0x42, 0x64, 0x76, 0xF9]
    assert quantise.fp4_rounded(values)[:10].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.5, -6.0]


def test_the_committed_checkpoint_is_small_and_whole() -> None:
    out = HERE / "checkpoint"
    assert sum(file.stat().st_size for file in out.rglob("*")) <= 24_000_000
    assert [*export.problems(TensorIndex.open(out), ModelConfig.from_dir(out))] == []
