"""The checkpoints people have: the preview, 0731 with its DSpark stages, early configurations, third-party extras."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import relay, tiny_checkpoint

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import INDEX_NAME, TensorIndex
from shared.checkpoint.pack import pack
from shared.checkpoint.records import ExpertRecords
from shared.checkpoint.safetensors_writer import TensorSpec, encode_header, library_order
from shared.checkpoint.schedule import expected_tensors, problems
from shared.checkpoint.synth_shapes import published_config
from shared.checkpoint.verify import verify


def write_zeros(directory: Path, published: dict[str, Any], extra: tuple[TensorSpec, ...] = ()) -> None:
    """A checkpoint of zeros in one shard, whatever its shape; tables of experts name the first ones."""
    expected = expected_tensors(ModelConfig.from_published(published))
    specs = library_order([*(TensorSpec(name, d, s) for name, (d, s) in expected.items()), *extra])
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(published))
    data = b"".join(first_experts(spec) if spec.name.endswith("tid2eid") else bytes(spec.nbytes) for spec in specs)
    (directory / "model-00001-of-00001.safetensors").write_bytes(encode_header(specs) + data)
    weight_map = {spec.name: "model-00001-of-00001.safetensors" for spec in specs}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def first_experts(spec: TensorSpec) -> bytes:
    rows, experts_per_tok = spec.shape
    return struct.pack(f"<{experts_per_tok}q", *range(experts_per_tok)) * rows


@pytest.fixture
def dspark() -> dict[str, Any]:
    """Three stages under mtp.*, though `num_nextn_predict_layers` says one."""
    published = published_config("tiny", layers=2, experts=4)
    published["compress_ratios"] += [0, 0]
    assert published["num_nextn_predict_layers"] == 1
    return published | {"dspark_block_size": 5, "dspark_noise_token_id": 500, "dspark_target_layer_ids": [0, 1, 1]}


def test_dspark_stages(tmp_path: Path, dspark: dict[str, Any]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_zeros(source, dspark)
    config, index = ModelConfig.from_dir(source), TensorIndex.open(source)
    assert (config.num_extra_blocks, config.num_moe_layers) == (3, 5)
    assert "mtp.2.markov_head.markov_w1.weight" in index.tensors
    assert "mtp.0.enorm.weight" not in index.tensors
    assert verify(source, full=True).problems == ()
    assert ExpertRecords(index, config).plan(4, 3).name == "mtp.2.ffn.experts.3"
    pack(source, out)
    assert verify(out, full=True).problems == ()
    assert (out / "mtp.2.safetensors").exists()


def test_third_party_extras_are_kept(tmp_path: Path) -> None:
    extra = (
        TensorSpec("mtp.0.emb.tok_emb.weight", "BF16", (512, 128)),
        TensorSpec("mtp.0.head.weight", "BF16", (512, 128)),
        TensorSpec("something.else", "F16", (3,)),
    )
    write_zeros(tmp_path / "source", published_config("tiny", 2, 4), extra)
    assert verify(tmp_path / "source").problems == ()
    pack(tmp_path / "source", tmp_path / "out")
    index = TensorIndex.open(tmp_path / "out")
    assert {spec.name for spec in extra} <= set(index.tensors)
    assert index["mtp.0.head.weight"].file.name == "mtp.0.safetensors"
    assert verify(tmp_path / "out", full=True).problems == ()


def test_what_early_downloads_lack(tmp_path: Path) -> None:
    source = tmp_path / "source"
    index = TensorIndex.open(tiny_checkpoint())
    relay(tiny_checkpoint(), source, [list(index.tensors)])
    published = json.loads((source / "config.json").read_text())
    del published["expert_dtype"]
    (source / "config.json").write_text(json.dumps(published))
    assert not (source / "inference").exists()
    config = ModelConfig.from_dir(source)
    assert config == ModelConfig.from_dir(tiny_checkpoint())
    assert list(problems(TensorIndex.open(source), config)) == []


def test_fp8_experts_without_saying_so_are_found(tmp_path: Path) -> None:
    published = published_config("tiny", 2, 4)
    del published["expert_dtype"]
    write_zeros(tmp_path / "source", published)
    shard = tmp_path / "source" / "model-00001-of-00001.safetensors"
    shard.write_bytes(
        shard.read_bytes().replace(b'experts.0.w1.weight":{"dtype":"I8"', b'experts.0.w1.weight":{"dtype":"U8"')
    )
    text = verify(tmp_path / "source").problems[0].text
    assert text == "tensor layers.0.ffn.experts.0.w1.weight is U8 [128, 64], expected I8 [128, 64]"
