"""The shapes a synthetic checkpoint can have, and the configuration files that describe them.

Owns the named widths and both spellings of the settings: the published `config.json` and the reference
implementation's `inference/config.json`. Knows nothing about weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Width:
    """Everything about a model's shape but its depth, number of experts and skew; defaults for the first two."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    original_positions: int
    num_experts_per_tok: int
    num_hash_layers: int
    layers: int
    experts: int


WIDTHS = {
    "full": Width(129280, 4096, 2048, 64, 512, 1024, 8, 1024, 128, 64, 128, 512, 65536, 6, 3, 43, 256),
    "small": Width(1024, 256, 128, 4, 128, 128, 2, 128, 128, 16, 128, 64, 1024, 4, 3, 8, 32),
    "tiny": Width(512, 128, 128, 4, 128, 128, 2, 128, 32, 16, 64, 16, 256, 4, 2, 6, 16),
}

ROPE_FACTOR = 16
MTP_BLOCKS = 1


def published_config(width: str, layers: int | None = None, experts: int | None = None) -> dict[str, Any]:
    """The `config.json` of a model of this width.

    Raises:
        ConfigError: the width is unknown, or the depth or the number of experts cannot be.
    """
    if width not in WIDTHS:
        raise ConfigError(f"--width {width}: unknown; one of {', '.join(WIDTHS)}")
    w = WIDTHS[width]
    layers = w.layers if layers is None else layers
    experts = w.experts if experts is None else experts
    if not 1 <= layers <= 1000:
        raise ConfigError(f"--layers {layers}: must be 1 to 1000")
    if not w.num_experts_per_tok <= experts <= 4096:
        raise ConfigError(
            f"--experts {experts}: must be {w.num_experts_per_tok} (experts per token at this width) to 4096"
        )
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": w.head_dim,
        "hidden_act": "silu",
        "hidden_size": w.hidden_size,
        "index_head_dim": w.index_head_dim,
        "index_n_heads": w.index_n_heads,
        "index_topk": w.index_topk,
        "max_position_embeddings": w.original_positions * ROPE_FACTOR,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": w.moe_intermediate_size,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": w.num_attention_heads,
        "num_experts_per_tok": w.num_experts_per_tok,
        "num_hidden_layers": layers,
        "num_hash_layers": min(w.num_hash_layers, layers),
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": MTP_BLOCKS,
        "o_groups": w.o_groups,
        "o_lora_rank": w.o_lora_rank,
        "q_lora_rank": w.q_lora_rank,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": ROPE_FACTOR,
            "original_max_position_embeddings": w.original_positions,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": w.sliding_window,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": w.vocab_size,
        "compress_rope_theta": 160000,
        "compress_ratios": compress_ratios(layers),
    }


def compress_ratios(layers: int) -> list[int]:
    """Two layers without compression, then 4 and 128 in turn, then the extra blocks, which have none."""
    return [0 if layer < 2 else 4 if layer % 2 == 0 else 128 for layer in range(layers)] + [0] * MTP_BLOCKS


# Published name -> the reference implementation's name, in the order of its file.
_REFERENCE_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_hash_layers": "n_hash_layers",
    "num_attention_heads": "n_heads",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "swiglu_limit": "swiglu_limit",
    "q_lora_rank": "q_lora_rank",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "window_size",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "expert_dtype": "expert_dtype",
    "compress_ratios": "compress_ratios",
}


def reference_config(published: dict[str, Any]) -> dict[str, Any]:
    """The `inference/config.json` that says the same as a published one."""
    rope = published["rope_scaling"]
    return {ours: published[theirs] for theirs, ours in _REFERENCE_NAMES.items()} | {
        "original_seq_len": rope["original_max_position_embeddings"],
        "rope_factor": rope["factor"],
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
    }


GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
