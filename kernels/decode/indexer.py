"""The indexer of a decode step: which compressed entries the attention sees once there are more than `topk`."""

from typing import Any

import tilelang.language as T

from kernels.decode.source import call, source
from kernels.tile import tile_kernel

ENTRIES = 64
"""Entries that one block scores: `kIndexEntries` of indexer.cuh."""


@tile_kernel(
    {"heads": 64, "d": 128, "rope": 64, "q_stride": 8192, "w_stride": 64, "topk": 512, "blocks": 128, "s": 1},
    {"heads": 16, "d": 64, "rope": 64, "q_stride": 1024, "w_stride": 16, "topk": 16, "blocks": 4, "s": 2},
)
def index_choice(heads: int, d: int, rope: int, q_stride: int, w_stride: int, topk: int, blocks: int, s: int) -> Any:
    """Scores of the first `blocks` times 64 entries, and the best `topk` of them, ascending; of equal ones the first.
    Neither where no choice has to be made."""
    entries, scale = T.dynamic("entries"), d**-0.5 * heads**-0.5
    q_heads, w_heads = T.dynamic("q_heads"), T.dynamic("w_heads")

    @T.prim_func
    def index_choice(
        q: T.StridedTensor((s, q_heads), (q_stride, 1), "float32"),
        w: T.StridedTensor((s, w_heads), (w_stride, 1), "float32"),
        positions: T.Tensor((s,), "int32"),
        keys: T.Tensor((s, entries, d), "bfloat16"),
        frequencies: T.Tensor((rope // 2,), "float32"),
        scores: T.Tensor((s, entries), "float32"),
        done: T.Tensor((s,), "uint32"),
        chosen: T.Tensor((s, topk), "int32"),
    ) -> None:
        with T.Kernel(blocks, s, threads=1024, prelude=source()):
            call(
                "index_choice",
                (heads, d, rope, 4, topk),
                *(q, q_stride, w, w_stride, scale, positions, keys, entries, frequencies, scores, done, chosen),
            )

    return index_choice
