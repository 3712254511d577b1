"""The model's shape as the published `config.json` states it, checked before anything is read.

Field names are the published ones. Other architectures, V4.1 among them, are refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError

MODEL_TYPE = "deepseek_v4"
RATIOS = (0, 4, 128)
# Far above every published model, and few enough to be listed tensor by tensor.
MOST_EXTRA_BLOCKS = 16
MOST_EXPERTS = 2**17

# Least and most of a number; those that are not named here are `_WHOLE`.
_WHOLE = (1, 10**8)
_BOUNDS: dict[str, tuple[float, float]] = {
    "num_hidden_layers": (1, 1000),
    "num_hash_layers": (0, 1000),
    "n_routed_experts": (1, 4096),
    "sliding_window": (1, 2**16),
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1000),
    "dspark_block_size": (0, 1000),
    "bos_token_id": (0, 10**8),
    "eos_token_id": (0, 10**8),
    "rope_theta": (2, 10**12),
    "compress_rope_theta": (2, 10**12),
    "rope_scaling.factor": (1, 10**6),
    "rope_scaling.beta_fast": (0.001, 10**6),
    "rope_scaling.beta_slow": (0.001, 10**6),
    "routed_scaling_factor": (0.001, 1000),
    "swiglu_limit": (0.001, 10**6),
    "hc_eps": (0, 1),
    "rms_norm_eps": (0, 1),
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN (https://arxiv.org/abs/2309.00071), used by the layers with compression."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a DeepSeek-V4 model. Widths in elements, `compress_ratios` one per layer and block."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_hash_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: int
    expert_dtype: str = "fp4"
    dspark_block_size: int = 0

    @classmethod
    def from_dir(cls, directory: Path) -> ModelConfig:
        """Read `config.json` of a checkpoint directory.

        Raises:
            CheckpointError: the directory or file is missing, not JSON, or describes a model that is not supported.
        """
        path = directory / "config.json"
        try:
            _refuse_gguf(directory)
            if not directory.is_dir():
                advice = "set model.path to the downloaded checkpoint"
                raise CheckpointError(f"{directory}: no such model directory; {advice}")
            table = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot read ({error.strerror}); is this a checkpoint directory?") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not valid JSON: {error}; download it again") from error
        if not isinstance(table, dict):
            raise CheckpointError(f"{path}: must hold a JSON object; download it again")
        return cls.from_published(table, str(path))

    @classmethod
    def from_published(cls, table: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """From the parsed content of a `config.json`; `source` names it in errors. Raises CheckpointError."""
        _refuse_other_models(table, source)
        hints = typing.get_type_hints(cls)
        values = {
            f.name: _value(table[f.name], hints[f.name], f.name, source)
            for f in dataclasses.fields(cls)
            if f.name in table
        }
        for f in dataclasses.fields(cls):
            if f.name not in values and f.default is dataclasses.MISSING:
                raise CheckpointError(f"{source}: '{f.name}' is missing")
        config = cls(**values)
        _check(config, table, source)
        return config

    @property
    def num_extra_blocks(self) -> int:
        """MTP or DSpark blocks after the backbone. `num_nextn_predict_layers` says 1 even where three exist."""
        return len(self.compress_ratios) - self.num_hidden_layers

    @property
    def is_dspark(self) -> bool:
        """Whether the extra blocks are DSpark stages, which have no enorm, hnorm, e_proj and h_proj."""
        return self.dspark_block_size > 0

    @property
    def num_moe_layers(self) -> int:
        """Layers and extra blocks that have routed experts; extra block m is MoE layer num_hidden_layers + m."""
        return len(self.compress_ratios)

    def layer_prefix(self, moe_layer: int) -> str:
        """The name prefix of a layer's or extra block's tensors."""
        extra = moe_layer - self.num_hidden_layers
        return f"layers.{moe_layer}." if extra < 0 else f"mtp.{extra}."

    def is_hash_layer(self, moe_layer: int) -> bool:
        """Whether the token id alone chooses the experts."""
        return moe_layer < self.num_hash_layers


def _refuse_gguf(directory: Path) -> None:
    named = [directory] if directory.suffix == ".gguf" else sorted(directory.glob("*.gguf"))
    if named and not (directory / "config.json").exists():
        raise CheckpointError(
            f"{named[0]}: GGUF is not supported; supported: the published safetensors files of {MODEL_TYPE} models"
        )


def _refuse_other_models(table: dict[str, Any], source: str) -> None:
    model_type = table.get("model_type")
    if model_type == MODEL_TYPE:
        return
    if model_type == "deepseek_v41":
        raise CheckpointError(
            f"{source}: model_type is deepseek_v41 (V4.1), another architecture that Icebox does not run yet; "
            f"supported: {MODEL_TYPE} (V4-Flash preview and 0731)"
        )
    raise CheckpointError(f"{source}: model_type {model_type!r} is not supported; supported: {MODEL_TYPE}")


def _value(value: Any, kind: Any, key: str, source: str) -> Any:
    if kind is RopeScaling:
        if not isinstance(value, dict) or value.get("type", value.get("rope_type")) != "yarn":
            raise CheckpointError(f"{source}: '{key}' must be a table with type yarn, not {value!r}")
        hints = typing.get_type_hints(RopeScaling)
        return RopeScaling(**{k: _value(value.get(k), t, f"{key}.{k}", source) for k, t in hints.items()})
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, list) or any(type(v) is not int for v in value):
            raise CheckpointError(f"{source}: '{key}' must be a list of whole numbers, not {value!r}")
        return tuple(value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise CheckpointError(f"{source}: '{key}' must be {kind.__name__}, not {value!r}")
    if kind is str:
        return value
    least, most = _BOUNDS.get(key, _WHOLE)
    if not least <= value <= most:  # NaN, which Python's JSON has, is not either
        raise CheckpointError(f"{source}: '{key}' must be {least:,} to {most:,}, not {reprlib.repr(value)}")
    return kind(value)


_FIXED = {
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def _check(config: ModelConfig, table: dict[str, Any], source: str) -> None:
    def demand(ok: bool, what: str) -> None:
        if not ok:
            raise CheckpointError(f"{source}: {what}")

    for key, wanted in _FIXED.items():
        demand(table.get(key, wanted) == wanted, f"'{key}' is {table.get(key)!r}; only {wanted!r} is supported")
    quantisation = table.get("quantization_config")
    if not isinstance(quantisation, dict):
        quantisation = {"quant_method": quantisation}
    method = quantisation.get("quant_method")
    if method is None and "quantization" in table:  # where mlx-lm puts it
        method = "mlx"
    demand(
        method == "fp8" and quantisation.get("weight_block_size") == [128, 128],
        f"quantization_config names {method!r}; only the published FP8 checkpoints (blocks of 128x128) are supported, "
        "not re-quantised ones (AWQ, GPTQ, MLX, GGUF)",
    )
    demand(config.expert_dtype == "fp4", f"expert_dtype is {config.expert_dtype!r}; only fp4 experts are supported")
    c = config
    demand(
        0 <= c.num_extra_blocks <= MOST_EXTRA_BLOCKS,
        f"compress_ratios has {len(c.compress_ratios)} entries for {c.num_hidden_layers} layers",
    )
    experts = c.num_moe_layers * c.n_routed_experts
    demand(experts <= MOST_EXPERTS, f"{experts:,} experts in all layers; at most {MOST_EXPERTS:,} are supported")
    odd = [r for r in c.compress_ratios if r not in RATIOS]
    demand(not odd, f"compress_ratios holds {odd[0] if odd else ''}; only 0, 4 and 128 are supported")
    demand(not any(c.compress_ratios[c.num_hidden_layers :]), "extra blocks with compression are not supported")
    demand(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok exceeds n_routed_experts")
    demand(c.num_hash_layers <= c.num_hidden_layers, "num_hash_layers exceeds num_hidden_layers")
    rotated = c.qk_rope_head_dim
    demand(rotated < c.head_dim and rotated % 2 == 0, "qk_rope_head_dim must be even and below head_dim")
    for key in ("bos_token_id", "eos_token_id"):
        demand(getattr(c, key) < c.vocab_size, f"{key} {getattr(c, key)} is outside the vocabulary of {c.vocab_size}")
    demand(c.num_attention_heads % c.o_groups == 0, "o_groups must divide num_attention_heads")
    demand(c.hidden_size % 32 == 0 and c.moe_intermediate_size % 32 == 0, "expert widths must be multiples of 32")
