"""Synthetic checkpoints: the vendor's layout, plausible values, the same bytes for the same seed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import tiny_checkpoint
from helpers.unreachable import UNREACHABLE, unreachable
from safetensors import safe_open

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.schedule import problems
from shared.checkpoint.synth import SynthOptions, synthesise
from shared.checkpoint.synth_shapes import published_config, reference_config
from shared.errors import CapacityError, CheckpointError, ConfigError

GOLDEN = Path(__file__).parents[2] / "golden" / "tiny-a"
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def load(directory: Path, name: str) -> torch.Tensor:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    with safe_open(directory / index["weight_map"][name], framework="pt") as file:
        return file.get_tensor(name)


def test_holds_every_tensor_of_the_schedule_and_nothing_else() -> None:
    out = tiny_checkpoint()
    config = ModelConfig.from_dir(out)
    assert list(problems(TensorIndex.open(out), config)) == []
    assert config.compress_ratios == (0, 0, 4, 128, 4, 0)
    assert [config.is_hash_layer(layer) for layer in range(5)] == [True, True, False, False, False]
    assert sorted(path.name for path in out.glob("*.safetensors")) == [
        f"model-{i:05d}-of-00008.safetensors" for i in range(1, 9)
    ]


def test_has_the_tensors_and_settings_of_the_recorded_checkpoint(tmp_path: Path) -> None:
    synthesise(tmp_path, SynthOptions("tiny"))
    ours, theirs = TensorIndex.open(tmp_path), TensorIndex.open(GOLDEN)
    assert {name: info[1:3] for name, info in ours.tensors.items()} == {
        name: info[1:3] for name, info in theirs.tensors.items()
    }
    assert ModelConfig.from_dir(tmp_path) == ModelConfig.from_dir(GOLDEN)
    recorded = json.loads((GOLDEN / "inference" / "config.json").read_text())
    assert json.loads((tmp_path / "inference" / "config.json").read_text()) == recorded


def test_shards_are_laid_out_as_the_library_lays_them_out(tmp_path: Path) -> None:
    for path in tiny_checkpoint().glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        from safetensors.torch import save_file

        save_file(tensors, tmp_path / path.name, metadata={"format": "pt"})
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_same_seed_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again = tiny_checkpoint(), tmp_path / "again"
    synthesise(again, SynthOptions("tiny", 5, 6, 0))
    for path in first.rglob("*.*"):
        assert path.read_bytes() == (again / path.relative_to(first)).read_bytes(), path
    name = "layers.2.ffn.experts.3.w1.weight"
    assert not torch.equal(load(first, name), load(tiny_checkpoint(seed=1), name))


def test_no_two_experts_are_alike() -> None:
    out = tiny_checkpoint()
    names = [
        f"{layer}.ffn.experts.{expert}.{part}.weight"
        for layer in ("layers.0", "layers.4", "mtp.0")
        for expert in range(6)
        for part in ("w1", "w2", "w3")
    ]
    assert len({load(out, name).numpy().tobytes() for name in names}) == len(names)


def test_weights_have_unit_gain() -> None:
    out = tiny_checkpoint()
    for name in ("layers.2.attn.wq_b", "layers.0.attn.wo_b", "mtp.0.e_proj", "layers.1.ffn.shared_experts.w2"):
        weight, scale = load(out, f"{name}.weight").float(), load(out, f"{name}.scale").float()
        blocks = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        assert torch.isfinite(weight).all()
        assert (weight * blocks).std().item() == pytest.approx(1 / math.sqrt(weight.shape[1]), rel=0.6)
    for part in ("w1", "w2", "w3"):
        values = dequantised_fp4(out, f"layers.3.ffn.experts.5.{part}")
        assert values.std().item() == pytest.approx(1 / math.sqrt(128), rel=0.1)
    assert load(out, "head.weight").float().std().item() == pytest.approx(3 / math.sqrt(128), rel=0.05)
    assert load(out, "embed.weight").float().std().item() == pytest.approx(1, rel=0.05)


def dequantised_fp4(out: Path, name: str) -> torch.Tensor:
    packed, scale = load(out, f"{name}.weight").view(torch.uint8).long(), load(out, f"{name}.scale").float()
    values = torch.stack((FP4[packed & 15], FP4[packed >> 4]), dim=-1).flatten(1)
    return values * scale.repeat_interleave(32, 1)


def test_every_float_is_finite() -> None:
    out = tiny_checkpoint()
    for path in out.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert torch.isfinite(file.get_tensor(name).float()).all(), name


def test_the_full_width_is_the_published_model() -> None:
    config = ModelConfig.from_published(published_config("full"))
    from shared.checkpoint.safetensors_writer import TensorSpec
    from shared.checkpoint.schedule import expected_tensors

    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape) in expected_tensors(config).items()]
    assert (len(specs), sum(spec.nbytes for spec in specs)) == (69_187, 159_609_485_896)
    assert reference_config(published_config("full"))["n_layers"] == 43


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SynthOptions("huge"), "--width huge: unknown; one of full, small, tiny"),
        (SynthOptions("tiny", layers=0), "--layers 0"),
        (SynthOptions("tiny", experts=3), r"--experts 3: must be 4"),
        (SynthOptions("tiny", skew=-1), "--skew -1"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path: Path, options: SynthOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthesise(tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_never_writes_into_a_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(CheckpointError, match="not an empty directory"):
        synthesise(tmp_path, SynthOptions("tiny"))


def test_too_little_disk_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CapacityError, match=r"needs [\d,]+ bytes, the file system has 1,000 free"):
        synthesise(tmp_path, SynthOptions("tiny"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", UNREACHABLE)
def test_a_place_that_cannot_be_reached_is_named(tmp_path: Path, kind: str) -> None:
    place = unreachable(tmp_path, kind)
    with pytest.raises(CheckpointError, match=rf"{place}: cannot be written to \(.+\); choose another place"):
        synthesise(place, SynthOptions("tiny", 1, 4))
