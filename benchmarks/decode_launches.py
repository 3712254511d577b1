"""The launches of one decode step in their order, and the bytes that each must read from memory.

Bytes are weights, experts, caches and the mixing's projections, from the model's shapes at batch 1. What one launch
hands to the next within a step is small, stays in the GPU's cache, and is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from services.worker.decode.extent import Extent
from shared.checkpoint.config import ModelConfig

BLOCK = 128  # one FP8 scale, a byte, for so many rows and columns
FP4_GROUP = 32  # one FP4 scale, a byte, for so many columns

START, HEAD, SAMPLING = "start", "head", "sampling"
OUTSIDE = (START, HEAD, SAMPLING)
"""Parts of a step that are no layer."""


class Launch(NamedTuple):
    """`kernel` is its name on the GPU, `part` "layer" or one of `OUTSIDE`."""

    name: str
    kernel: str
    nbytes: int
    part: str = "layer"


def step_launches(c: ModelConfig, extent: Extent, position: int, guesses: bool = True) -> list[Launch]:
    """Of the step that takes in the token at `position`, with every expert resident.

    `guesses`: each layer applies the next one's gate too, as with prefetch.look_ahead.
    """
    launches = [Launch("embedding", "streams_start_kernel", 2 * c.hidden_size + _mixing(c), START)]
    for layer in range(c.num_hidden_layers):
        launches += _attention(c, extent, c.compress_ratios[layer], position)
        launches += _experts(c, layer, guesses)
    norm = 4 * c.hidden_size
    return [
        *launches,
        Launch("head's input", "head_read_kernel", norm, HEAD),
        Launch("vocabulary", "fused_linear_kernel", 2 * c.vocab_size * c.hidden_size, HEAD),
        Launch("top-k, top-p, min-p", "sample_threshold_kernel", 0, SAMPLING),
        Launch("draw", "sample_kernel", 0, SAMPLING),
    ]


def _attention(c: ModelConfig, extent: Extent, ratio: int, position: int) -> list[Launch]:
    d, heads_width = c.hidden_size, c.num_attention_heads * c.head_dim
    chooses = ratio == 4 and extent.chooses(c)
    entries = (position + 1) // ratio if ratio else 0
    seen = min(position + 1, c.sliding_window) + (min(entries, c.index_topk) if ratio == 4 else entries)
    low_rank, compressed = c.q_lora_rank + c.head_dim, _compressed_rows(c, ratio)
    index = c.index_n_heads * c.index_head_dim if chooses else 0
    choice = Launch("index choice", "index_choice_kernel", 2 * entries * c.index_head_dim)
    return [
        Launch("attention's input", "sublayer_read_kernel", 4 * d),
        Launch(_inputs_name(ratio), "fused_linear_kernel", _fp8(low_rank, d) + 2 * compressed * d),
        Launch("norms, ring, compressors", "attention_inputs_kernel", 4 * low_rank),
        Launch(
            "wq_b and the indexer's" if chooses else "wq_b",
            "fused_linear_kernel",
            _fp8(heads_width + index, c.q_lora_rank),
        ),
        *([choice] if chooses else []),
        Launch("attention", "attend_chunks_kernel", 2 * seen * c.head_dim),
        Launch("attention's sum", "attend_combine_kernel", 4 * c.num_attention_heads),
        Launch("wo_a", "grouped_linear_kernel", _fp8(c.o_groups * c.o_lora_rank, heads_width // c.o_groups)),
        Launch("wo_b", "quantised_linear_kernel", _fp8(d, c.o_groups * c.o_lora_rank)),
        Launch("attention's output", "attention_write_kernel", _mixing(c)),
    ]


def _experts(c: ModelConfig, layer: int, guesses: bool) -> list[Launch]:
    d, width, topk = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    shared = c.n_shared_experts * width
    matrix = width * d // 2 + width * d // FP4_GROUP
    is_last = layer == c.num_hidden_layers - 1
    following = 4 * c.hc_mult * c.hc_mult * d if is_last else _mixing(c)
    chooses = 8 * topk if c.is_hash_layer(layer) else 4 * c.n_routed_experts
    gates = 2 * (1 + guesses) * c.n_routed_experts * d
    return [
        Launch("experts' input", "sublayer_read_kernel", 4 * d),
        Launch("gates, shared w1, w3", "fused_linear_kernel", _fp8(2 * shared, d) + gates),
        Launch("route", "route_kernel", chooses),
        Launch("experts w1, w3, shared w2", "experts_up_kernel", 2 * topk * matrix + _fp8(d, shared)),
        Launch("experts w2", "experts_down_kernel", topk * matrix),
        Launch("experts' output", "experts_write_kernel", following),
    ]


def _inputs_name(ratio: int) -> str:
    return f"wq_a, wkv, compressors ({ratio})" if ratio else "wq_a, wkv"


def _compressed_rows(c: ModelConfig, ratio: int) -> int:
    """bfloat16 rows beside wq_a and wkv: values and gates of the compressors, and the indexer's weights."""
    if ratio == 4:
        return 2 * 2 * c.head_dim + 2 * 2 * c.index_head_dim + c.index_n_heads
    return 2 * c.head_dim if ratio else 0


def _fp8(rows: int, columns: int) -> int:
    return rows * columns + -(-rows // BLOCK) * -(-columns // BLOCK)


def _mixing(c: ModelConfig) -> int:
    """The float32 projection by which a hyper-connection sets its mixing: (2 + n) n rows over n streams."""
    return 4 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * c.hidden_size
