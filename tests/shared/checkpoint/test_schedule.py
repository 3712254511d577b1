"""The tensors that a model must have, held to the published checkpoints."""

import math

import pytest
from helpers.checkpoints import tiny_checkpoint
from helpers.services import ROOT

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.safetensors_header import DTYPE_BITS
from shared.checkpoint.schedule import expected_tensors, problems
from shared.checkpoint.synth_shapes import published_config

FULL = published_config("full")
PREVIEW = ModelConfig.from_published(FULL)
RELEASE = ModelConfig.from_published(
    FULL | {"compress_ratios": [*FULL["compress_ratios"], 0, 0], "dspark_block_size": 5}
)
TINY = ROOT / "tests" / "golden" / "tiny-a"


# Numbers of tensors and bytes: `metadata.total_size` and the weight maps of the two published checkpoints.
@pytest.mark.parametrize(
    ("config", "tensors", "nbytes"), [(PREVIEW, 69187, 159_609_485_896), (RELEASE, 72317, 166_878_536_440)]
)
def test_the_published_checkpoints_to_the_byte(config, tensors, nbytes):
    expected = expected_tensors(config)
    assert len(expected) == tensors
    assert sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in expected.values()) == nbytes


# A line of each kind from the headers of the published shards.
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 4096)),
        ("hc_head_fn", "F32", (4, 16384)),
        ("layers.0.hc_attn_fn", "F32", (24, 16384)),
        ("layers.0.attn.attn_sink", "F32", (64,)),
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1024)),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (256, 8)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.2.attn.compressor.wkv.weight", "BF16", (1024, 4096)),
        ("layers.3.attn.compressor.wkv.weight", "BF16", (512, 4096)),
        ("layers.2.attn.compressor.ape", "F32", (4, 1024)),
        ("layers.3.attn.compressor.ape", "F32", (128, 512)),
        ("layers.2.attn.indexer.wq_b.weight", "F8_E4M3", (8192, 1024)),
        ("layers.2.attn.indexer.weights_proj.weight", "BF16", (64, 4096)),
        ("layers.2.attn.indexer.compressor.ape", "F32", (4, 256)),
        ("layers.2.ffn.gate.tid2eid", "I64", (129280, 6)),
        ("layers.3.ffn.gate.bias", "F32", (256,)),
        ("layers.42.ffn.experts.255.w1.weight", "I8", (2048, 2048)),
        ("layers.42.ffn.experts.255.w1.scale", "F8_E8M0", (2048, 128)),
        ("layers.42.ffn.experts.255.w2.weight", "I8", (4096, 1024)),
        ("layers.42.ffn.experts.255.w2.scale", "F8_E8M0", (4096, 64)),
        ("layers.0.ffn.shared_experts.w2.scale", "F8_E8M0", (32, 16)),
        ("mtp.0.ffn.experts.0.w3.weight", "I8", (2048, 2048)),
        ("mtp.0.e_proj.scale", "F8_E8M0", (32, 32)),
    ],
)
def test_one_of_each_kind(name, dtype, shape):
    assert expected_tensors(PREVIEW)[name] == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.attn.compressor.wkv.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.3.ffn.gate.tid2eid",
        "layers.2.ffn.gate.bias",
        "layers.43.attn_norm.weight",
        "mtp.1.attn_norm.weight",
        "mtp.0.main_proj.weight",
        "layers.0.ffn.experts.256.w1.weight",
    ],
)
def test_what_a_layer_does_not_have(name):
    assert name not in expected_tensors(PREVIEW)


def test_the_releases_blocks_are_other_ones():
    expected = expected_tensors(RELEASE)
    assert expected["mtp.0.main_proj.weight"] == ("F8_E4M3", (4096, 12288))
    assert expected["mtp.2.markov_head.markov_w1.weight"] == ("BF16", (129280, 256))
    assert expected["mtp.2.confidence_head.proj.weight"] == ("BF16", (1, 4352))
    assert not {"mtp.0.e_proj.weight", "mtp.0.norm.weight", "mtp.1.main_proj.weight"} & expected.keys()


@pytest.mark.parametrize("directory", [TINY, None], ids=["golden", "synthetic"])
def test_a_whole_checkpoint_has_no_problems(directory):
    directory = directory or tiny_checkpoint()
    index = TensorIndex.open(directory)
    assert list(problems(index, ModelConfig.from_dir(directory))) == []


def change(index: TensorIndex, name: str, **fields) -> TensorIndex:
    tensors = dict(index.tensors)
    info = tensors.pop(name)
    if fields:
        tensors[name] = info._replace(**fields)
    return TensorIndex(index.directory, tensors, index.files, index.fingerprint)


def test_each_kind_of_problem_is_told_with_its_tensor():
    config, index = ModelConfig.from_dir(TINY), TensorIndex.open(TINY)
    name = "layers.3.ffn.experts.7.w2.weight"
    file = index[name].file.name
    assert list(problems(change(index, name), config)) == [f"tensor {name} is missing"]
    assert list(problems(change(index, name, dtype="U8"), config)) == [
        f"{file}: tensor {name} is U8 [128, 64], expected I8 [128, 64]"
    ]
    assert list(problems(change(index, name, shape=(64, 128)), config)) == [
        f"{file}: tensor {name} is I8 [64, 128], expected I8 [128, 64]"
    ]


def test_extra_tensors_are_allowed():
    config, index = ModelConfig.from_dir(TINY), TensorIndex.open(TINY)
    extra = dict(index.tensors) | {"mtp.0.emb.tok_emb.weight": index["embed.weight"]}
    assert list(problems(TensorIndex(index.directory, extra, index.files, ""), config)) == []
