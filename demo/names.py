"""Names of one model's parameters: `transformers` on the left, the published checkpoint on the right.

A parameter of several experts is several tensors in the checkpoint; that cut is made in `export`. Sources: the headers
of the published shards, and transformers' models/deepseek_v4.
"""

from __future__ import annotations

import re

_MODULES = {
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.experts.gate_up_proj": "ffn.experts.*.w1+w3.weight",
    "mlp.experts.down_proj": "ffn.experts.*.w2.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
} | {f"{half}_hc.{part}": f"hc_{half}_{part}" for half in ("attn", "ffn") for part in ("fn", "base", "scale")}

_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}

_BLOCK = {
    **{f"{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "norm", "e_proj", "h_proj")},
    **{f"hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")},
}


def published_name(name: str) -> str:
    """The checkpoint's name; for experts a pattern with `*` for the number and `w1+w3` for a fused pair.

    The extra block's parameters are called `mtp.*` here, its layer's `mtp.layer.*`. Raises KeyError.
    """
    if name in _TOP:
        return _TOP[name]
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        return f"layers.{match[1]}.{_MODULES[match[2]]}"
    if name.startswith("mtp.layer."):
        return f"mtp.0.{_MODULES[name.removeprefix('mtp.layer.')]}"
    return f"mtp.0.{_BLOCK[name.removeprefix('mtp.')]}"
