"""Attention of a decode step: what the projections give to the caches, and one query a sequence against its keys."""

from typing import Any

import tilelang.language as T

from kernels.decode.source import call, source
from kernels.tile import tile_kernel

CHUNK = 64
"""Keys of the list that one block sees."""

_PUBLISHED = {"d": 512, "rope": 64, "window": 128, "s": 1}
_TINY = {"d": 128, "rope": 64, "window": 32, "s": 2}


def num_heads_a_block(heads: int) -> int:
    return min(heads, 8)


def compressor_rows(ratio: int) -> int:
    """Tokens that a compressor's state holds: a group, with overlap the one before it too."""
    return 2 * ratio if ratio == 4 else ratio


def compressor_width(ratio: int, d: int) -> int:
    return 2 * d if ratio == 4 else d


def num_inputs(q: int, d: int, ratio: int, index_d: int, index_heads: int) -> int:
    """Width of what `fused_linear` gives to `attention_inputs`."""
    width = q + d + (2 * compressor_width(ratio, d) if ratio else 0)
    return width + (2 * compressor_width(ratio, index_d) + index_heads if ratio == 4 else 0)


@tile_kernel(
    *({**_PUBLISHED, "q": 1024, "ratio": r, "index_d": 128, "index_heads": 64, "eps": 1e-6} for r in (0, 4, 128)),
    {**_TINY, "q": 128, "ratio": 4, "index_d": 64, "index_heads": 16, "eps": 1e-6},
)
def attention_inputs(
    q: int, d: int, rope: int, ratio: int, index_d: int, index_heads: int, window: int, s: int, eps: float
) -> Any:
    """The quantised low-rank query; the new key into the ring; the compressors' step and its entry."""
    n = num_inputs(q, d, ratio, index_d, index_heads)
    group = ratio or 1
    rows, entries = T.dynamic("rows"), T.dynamic("entries")
    state = (s, 2, compressor_rows(group), compressor_width(group, d))
    index_state = (s, 2, compressor_rows(group), compressor_width(group, index_d))

    @T.prim_func
    def attention_inputs(
        y: T.Tensor((s, n), "float32"),
        positions: T.Tensor((s,), "int32"),
        q_norm: T.Tensor((q,), "float32"),
        kv_norm: T.Tensor((d,), "float32"),
        norm: T.Tensor((d,), "float32"),
        ape: T.Tensor((group, compressor_width(group, d)), "float32"),
        index_norm: T.Tensor((index_d,), "float32"),
        index_ape: T.Tensor((group, compressor_width(group, index_d)), "float32"),
        frequencies: T.Tensor((rope // 2,), "float32"),
        codes: T.Tensor((s, q), "uint8"),
        scales: T.Tensor((s, q // 128), "float32"),
        keys: T.Tensor((s, rows, d), "bfloat16"),
        compressor: T.Tensor(state, "float32"),
        index_keys: T.Tensor((s, entries, index_d), "bfloat16"),
        index_compressor: T.Tensor(index_state, "float32"),
    ) -> None:
        with T.Kernel(2 if ratio == 0 else 4 if ratio == 4 else 3, s, threads=256, prelude=source()):
            call(
                "attention_inputs",
                (q, d, rope, ratio, index_d, window, n),
                *(y, positions, q_norm, kv_norm, norm, ape, index_norm, index_ape, frequencies, eps),
                *(rows - window, codes, scales, keys, compressor, index_keys, index_compressor),
            )

    return attention_inputs


@tile_kernel(
    {**_PUBLISHED, "heads": 64, "q_stride": 32768, "ratio": 0, "topk": 512, "chunks": 2, "eps": 1e-6},
    {**_PUBLISHED, "heads": 64, "q_stride": 40960, "ratio": 4, "topk": 512, "chunks": 10, "eps": 1e-6},
    {**_TINY, "heads": 4, "q_stride": 512, "ratio": 128, "topk": 16, "chunks": 2, "eps": 1e-6},
)
def attend_chunks(
    heads: int, d: int, rope: int, q_stride: int, window: int, ratio: int, topk: int, chunks: int, s: int, eps: float
) -> Any:
    """Heads of the query, normed and rotated, against chunks of the key list; sums that are not normalised."""
    rows, scale = T.dynamic("rows"), d**-0.5
    chooses = topk if ratio == 4 else 0

    @T.prim_func
    def attend_chunks(
        q: T.Tensor((s, q_stride), "float32"),
        positions: T.Tensor((s,), "int32"),
        keys: T.Tensor((s, rows, d), "bfloat16"),
        chosen: T.Tensor((s, topk), "int32"),
        frequencies: T.Tensor((rope // 2,), "float32"),
        sums: T.Tensor((s, chunks, heads, d), "float32"),
        tops: T.Tensor((s, chunks, heads), "float32"),
        denominators: T.Tensor((s, chunks, heads), "float32"),
    ) -> None:
        with T.Kernel(heads // num_heads_a_block(heads), chunks, s, threads=256, prelude=source()):
            call(
                "attend_chunk",
                (heads, d, rope, window, ratio, chooses),
                *(q, q_stride, positions, keys, rows - window, chosen, frequencies, eps, scale),
                *(sums, tops, denominators),
            )

    return attend_chunks


@tile_kernel(
    {"heads": 64, "d": 512, "rope": 64, "chunks": 10, "s": 1}, {"heads": 4, "d": 128, "rope": 64, "chunks": 2, "s": 2}
)
def attend_combine(heads: int, d: int, rope: int, chunks: int, s: int) -> Any:
    """The chunks' sums as one softmax with the head's sink, rotated back; bfloat16 [s, heads * d]."""

    @T.prim_func
    def attend_combine(
        sums: T.Tensor((s, chunks, heads, d), "float32"),
        tops: T.Tensor((s, chunks, heads), "float32"),
        denominators: T.Tensor((s, chunks, heads), "float32"),
        sink: T.Tensor((heads,), "float32"),
        positions: T.Tensor((s,), "int32"),
        frequencies: T.Tensor((rope // 2,), "float32"),
        o: T.Tensor((s, heads * d), "bfloat16"),
    ) -> None:
        with T.Kernel(heads, s, threads=d // 2, prelude=source()):
            call("attend_combine", (heads, d, rope, chunks), sums, tops, denominators, sink, positions, frequencies, o)

    return attend_combine
