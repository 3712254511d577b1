"""Which tensors a checkpoint of a given shape must hold: name, safetensors type and shape of each.

Source: the headers of the published V4-Flash shards (preview and 0731). Extra tensors are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex

Expected = dict[str, tuple[str, tuple[int, ...]]]
_Entries = Iterator[tuple[str, str, tuple[int, ...]]]

# DSpark's Markov head factorises the vocabulary's bigram table.
_MARKOV_RANK = 256


def expected_tensors(config: ModelConfig) -> Expected:
    """{name: (dtype, shape)} of every tensor of the model, backbone and extra blocks."""
    entries: list[tuple[str, str, tuple[int, ...]]] = [*_globals(config)]
    for layer in range(config.num_moe_layers):
        entries += _layer(config, layer)
    for block in range(config.num_extra_blocks):
        entries += _dspark(config, block) if config.is_dspark else _mtp(config, block)
    return {name: (dtype, shape) for name, dtype, shape in entries}


def problems(index: TensorIndex, config: ModelConfig) -> Iterator[str]:
    """What the checkpoint lacks or has of another type or shape, one sentence each."""
    for name, (dtype, shape) in expected_tensors(config).items():
        info = index.tensors.get(name)
        if info is None:
            yield f"tensor {name} is missing"
        elif (info.dtype, info.shape) != (dtype, shape):
            yield f"{info.file.name}: tensor {name} is {info.dtype} {list(info.shape)}, expected {dtype} {list(shape)}"


def _globals(c: ModelConfig) -> _Entries:
    yield "embed.weight", "BF16", (c.vocab_size, c.hidden_size)
    yield "head.weight", "BF16", (c.vocab_size, c.hidden_size)
    yield "norm.weight", "BF16", (c.hidden_size,)
    yield from _hc_head(c, "")


def _hc_head(c: ModelConfig, prefix: str) -> _Entries:
    yield f"{prefix}hc_head_fn", "F32", (c.hc_mult, c.hc_mult * c.hidden_size)
    yield f"{prefix}hc_head_base", "F32", (c.hc_mult,)
    yield f"{prefix}hc_head_scale", "F32", (1,)


def _layer(c: ModelConfig, layer: int) -> _Entries:
    p = c.layer_prefix(layer)
    mixes = (2 + c.hc_mult) * c.hc_mult
    for half in ("attn", "ffn"):
        yield f"{p}{half}_norm.weight", "BF16", (c.hidden_size,)
        yield f"{p}hc_{half}_fn", "F32", (mixes, c.hc_mult * c.hidden_size)
        yield f"{p}hc_{half}_base", "F32", (mixes,)
        yield f"{p}hc_{half}_scale", "F32", (3,)
    yield from _attention(c, f"{p}attn.", c.compress_ratios[layer])
    yield from _moe(c, f"{p}ffn.", layer)


def _attention(c: ModelConfig, p: str, ratio: int) -> _Entries:
    yield f"{p}attn_sink", "F32", (c.num_attention_heads,)
    yield from _fp8(f"{p}wq_a", c.q_lora_rank, c.hidden_size)
    yield f"{p}q_norm.weight", "BF16", (c.q_lora_rank,)
    yield from _fp8(f"{p}wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
    yield from _fp8(f"{p}wkv", c.head_dim, c.hidden_size)
    yield f"{p}kv_norm.weight", "BF16", (c.head_dim,)
    yield from _fp8(f"{p}wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups)
    yield from _fp8(f"{p}wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)
    if ratio:
        yield from _compressor(c, f"{p}compressor.", ratio, c.head_dim)
    if ratio == 4:
        yield from _fp8(f"{p}indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield f"{p}indexer.weights_proj.weight", "BF16", (c.index_n_heads, c.hidden_size)
        yield from _compressor(c, f"{p}indexer.compressor.", ratio, c.index_head_dim)


def _compressor(c: ModelConfig, p: str, ratio: int, width: int) -> _Entries:
    columns = width * (2 if ratio == 4 else 1)  # ratio 4 overlaps: a half for the previous group, one for its own
    yield f"{p}wkv.weight", "BF16", (columns, c.hidden_size)
    yield f"{p}wgate.weight", "BF16", (columns, c.hidden_size)
    yield f"{p}ape", "F32", (ratio, columns)
    yield f"{p}norm.weight", "BF16", (width,)


def _moe(c: ModelConfig, p: str, layer: int) -> _Entries:
    yield f"{p}gate.weight", "BF16", (c.n_routed_experts, c.hidden_size)
    if c.is_hash_layer(layer):
        yield f"{p}gate.tid2eid", "I64", (c.vocab_size, c.num_experts_per_tok)
    else:
        yield f"{p}gate.bias", "F32", (c.n_routed_experts,)
    for expert in range(c.n_routed_experts):
        yield from _fp4(f"{p}experts.{expert}.w1", c.moe_intermediate_size, c.hidden_size)
        yield from _fp4(f"{p}experts.{expert}.w3", c.moe_intermediate_size, c.hidden_size)
        yield from _fp4(f"{p}experts.{expert}.w2", c.hidden_size, c.moe_intermediate_size)
    shared = c.n_shared_experts * c.moe_intermediate_size
    yield from _fp8(f"{p}shared_experts.w1", shared, c.hidden_size)
    yield from _fp8(f"{p}shared_experts.w3", shared, c.hidden_size)
    yield from _fp8(f"{p}shared_experts.w2", c.hidden_size, shared)


def _mtp(c: ModelConfig, block: int) -> _Entries:
    p = f"mtp.{block}."
    for name in ("enorm", "hnorm", "norm"):
        yield f"{p}{name}.weight", "BF16", (c.hidden_size,)
    yield from _fp8(f"{p}e_proj", c.hidden_size, c.hidden_size)
    yield from _fp8(f"{p}h_proj", c.hidden_size, c.hidden_size)
    yield from _hc_head(c, p)


def _dspark(c: ModelConfig, block: int) -> _Entries:
    p = f"mtp.{block}."
    if block == 0:
        yield from _fp8(f"{p}main_proj", c.hidden_size, 3 * c.hidden_size)
        yield f"{p}main_norm.weight", "BF16", (c.hidden_size,)
    if block == c.num_extra_blocks - 1:
        yield f"{p}norm.weight", "BF16", (c.hidden_size,)
        yield from _hc_head(c, p)
        yield f"{p}markov_head.markov_w1.weight", "BF16", (c.vocab_size, _MARKOV_RANK)
        yield f"{p}markov_head.markov_w2.weight", "BF16", (c.vocab_size, _MARKOV_RANK)
        yield f"{p}confidence_head.proj.weight", "BF16", (1, c.hidden_size + _MARKOV_RANK)


def _fp8(name: str, rows: int, columns: int) -> _Entries:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.scale", "F8_E8M0", (-(-rows // 128), -(-columns // 128))


def _fp4(name: str, rows: int, columns: int) -> _Entries:
    yield f"{name}.weight", "I8", (rows, columns // 2)  # two values a byte
    yield f"{name}.scale", "F8_E8M0", (rows, columns // 32)
