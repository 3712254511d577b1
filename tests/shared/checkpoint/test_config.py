"""The published config.json: what it says, what it may leave out, and what is refused by name."""

import dataclasses
import json

import pytest
from helpers.services import ROOT

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.synth_shapes import published_config
from shared.errors import CheckpointError, ExitCode

FULL = published_config("full")


def parse(**changes) -> ModelConfig:
    return ModelConfig.from_published(FULL | changes)


def without(key: str) -> dict:
    return {k: v for k, v in FULL.items() if k != key}


def test_the_published_values_arrive():
    config = parse()
    assert (config.num_hidden_layers, config.n_routed_experts, config.num_experts_per_tok) == (43, 256, 6)
    assert config.rope_theta == 10000.0
    assert isinstance(config.rope_theta, float)
    assert config.rope_scaling.original_max_position_embeddings == 65536
    assert config.compress_ratios[:5] == (0, 0, 4, 128, 4)


def test_a_real_directory():
    config = ModelConfig.from_dir(ROOT / "tests" / "golden" / "tiny-a")
    assert (config.hidden_size, config.num_moe_layers, config.n_routed_experts) == (128, 7, 16)


def test_layers_and_blocks():
    config = parse()
    assert (config.num_extra_blocks, config.num_moe_layers, config.is_dspark) == (1, 44, False)
    assert [config.layer_prefix(i) for i in (0, 42, 43)] == ["layers.0.", "layers.42.", "mtp.0."]
    assert [config.is_hash_layer(i) for i in (2, 3, 43)] == [True, False, False]


def test_three_extra_blocks_are_counted_though_the_file_says_one():
    config = parse(compress_ratios=[*FULL["compress_ratios"], 0, 0], dspark_block_size=5, num_nextn_predict_layers=1)
    assert (config.num_extra_blocks, config.is_dspark, config.layer_prefix(45)) == (3, True, "mtp.2.")


def test_a_missing_expert_type_is_fp4():
    assert ModelConfig.from_published(without("expert_dtype")).expert_dtype == "fp4"


def test_unknown_keys_are_the_vendors_business():
    assert parse(some_new_key=[1, 2]) == parse()


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().vocab_size = 1


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("deepseek_v41", r"deepseek_v41 \(V4\.1\), another architecture that Icebox does not run yet"),
        ("deepseek_v3", "'deepseek_v3' is not supported; supported: deepseek_v4"),
        (None, "None is not supported"),
        ([], "is not supported"),
    ],
)
def test_other_models_are_refused_by_name(model_type, message):
    with pytest.raises(CheckpointError, match=message):
        parse(model_type=model_type)


def test_a_model_without_a_type_is_refused():
    with pytest.raises(CheckpointError, match="model_type None"):
        ModelConfig.from_published(without("model_type"))


REQUIRED = [f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING]


@pytest.mark.parametrize("key", REQUIRED)
def test_every_required_key_is_missed_by_name(key):
    with pytest.raises(CheckpointError, match=f"'{key}' is missing"):
        ModelConfig.from_published(without(key), "config.json")


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(ModelConfig)])
@pytest.mark.parametrize("value", [None, {}, True])
def test_every_key_of_another_type_is_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=f"config.json: '{key}' must be"):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "129280"}, "'vocab_size' must be int"),
        ({"vocab_size": 1.5}, "'vocab_size' must be int"),
        ({"vocab_size": 0}, "'vocab_size' must be 1 to 100,000,000, not 0"),
        ({"num_experts_per_tok": -6}, "'num_experts_per_tok' must be 1 to 100,000,000, not -6"),
        ({"num_hash_layers": -1}, "'num_hash_layers' must be 0 to 1,000, not -1"),
        ({"compress_ratios": [0, "4"]}, "'compress_ratios' must be a list of whole numbers"),
        ({"compress_ratios": [0] * 42}, "42 entries for 43 layers"),
        ({"compress_ratios": [0] * 60}, "60 entries for 43 layers"),
        ({"compress_ratios": [2] + [0] * 43}, "compress_ratios holds 2; only 0, 4 and 128"),
        ({"compress_ratios": [0] * 43 + [4]}, "extra blocks with compression"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "must be a table with type yarn"),
        ({"rope_scaling": FULL["rope_scaling"] | {"factor": None}}, "'rope_scaling.factor' must be float"),
        ({"hc_eps": 10**400}, r"'hc_eps' must be 0 to 1, not 10+\.\.\.0+$"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be 0 to 1, not nan"),
        ({"rms_norm_eps": float("-inf")}, "'rms_norm_eps' must be 0 to 1, not -inf"),
        (
            {"rope_scaling": FULL["rope_scaling"] | {"factor": float("inf")}},
            "'rope_scaling.factor' must be 1 to 1,000,000",
        ),
        ({"rope_scaling": FULL["rope_scaling"] | {"beta_slow": 0}}, "'rope_scaling.beta_slow' must be 0.001 to"),
        ({"num_hidden_layers": 10**400}, "'num_hidden_layers' must be 1 to 1,000, not 1"),
        ({"n_routed_experts": 10**7}, "'n_routed_experts' must be 1 to 4,096, not 10000000"),
        ({"n_routed_experts": 4096}, "180,224 experts in all layers; at most 131,072"),
        ({"sliding_window": 10**12}, "'sliding_window' must be 1 to 65,536"),
        ({"hc_sinkhorn_iters": 10**9}, "'hc_sinkhorn_iters' must be 1 to 1,000"),
        ({"rope_theta": -1}, "'rope_theta' must be 2 to 1,000,000,000,000, not -1"),
        ({"compress_rope_theta": 0.0}, "'compress_rope_theta' must be 2 to"),
        ({"hc_eps": -1e-6}, "'hc_eps' must be 0 to 1, not -1e-06"),
        ({"swiglu_limit": 0}, "'swiglu_limit' must be 0.001 to"),
        ({"bos_token_id": -1}, "'bos_token_id' must be 0 to"),
        ({"eos_token_id": 129_280}, "eos_token_id 129280 is outside the vocabulary of 129280"),
        ({"scoring_func": "softmax"}, "'scoring_func' is 'softmax'; only 'sqrtsoftplus'"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True"),
        ({"num_key_value_heads": 8}, "'num_key_value_heads' is 8"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config names 'awq'.*not re-quantised"),
        ({"quantization_config": {}, "quantization": {"group_size": 64, "bits": 4}}, "names 'mlx'.*not re-quantised"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "blocks of 128x128"),
        ({"quantization_config": "gguf"}, "names 'gguf'"),
        ({"quantization_config": "fp8"}, "quantization_config names 'fp8'"),
        ({"quantization_config": None}, "quantization_config names None"),
        ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8'; only fp4"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok exceeds n_routed_experts"),
        ({"num_hash_layers": 44}, "num_hash_layers exceeds num_hidden_layers"),
        ({"qk_rope_head_dim": 512}, "qk_rope_head_dim must be even and below head_dim"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even and below head_dim"),
        ({"o_groups": 7}, "o_groups must divide"),
        ({"moe_intermediate_size": 2050}, "multiples of 32"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_read(changes, message):
    with pytest.raises(CheckpointError, match=message):
        parse(**changes)


def test_a_config_without_quantisation_is_refused():
    with pytest.raises(CheckpointError, match="quantization_config names None"):
        ModelConfig.from_published(without("quantization_config"))


def test_files_that_are_none(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"no such model directory; set model\.path"):
        ModelConfig.from_dir(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot read \(File name too long"):
        ModelConfig.from_dir(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match=r"config\.json: cannot read \(No such file"):
        ModelConfig.from_dir(tmp_path)
    for content, message in ((b"{", "not valid JSON"), (b"\xff\xfe", "not valid JSON"), (b"[1]", "a JSON object")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as refusal:
            ModelConfig.from_dir(tmp_path)
        assert str(path) in str(refusal.value)
        assert refusal.value.exit_code is ExitCode.CONFIG
    path.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="'llama' is not supported"):
        ModelConfig.from_dir(tmp_path)


def test_json_that_nests_too_deep(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)
