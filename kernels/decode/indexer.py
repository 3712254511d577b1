"""The indexer of a decode step: which compressed entries the attention sees once there are more than `topk`."""

from typing import Any

import tilelang.language as T

from kernels.decode.source import call, source
from kernels.tile import tile_kernel

ENTRIES = 64
"""Entries that one block scores."""


@tile_kernel(
    {"heads": 64, "d": 128, "rope": 64, "q_stride": 8192, "w_stride": 64, "topk": 512, "blocks": 128, "s": 1},
    {"heads": 16, "d": 64, "rope": 64, "q_stride": 1024, "w_stride": 16, "topk": 16, "blocks": 4, "s": 2},
)
def index_scores(heads: int, d: int, rope: int, q_stride: int, w_stride: int, topk: int, blocks: int, s: int) -> Any:
    """Scores of the first `blocks` times 64 entries; none if no choice has to be made."""
    entries, scale = T.dynamic("entries"), d**-0.5 * heads**-0.5
    q_heads, w_heads = T.dynamic("q_heads"), T.dynamic("w_heads")

    @T.prim_func
    def index_scores(
        q: T.StridedTensor((s, q_heads), (q_stride, 1), "float32"),
        w: T.StridedTensor((s, w_heads), (w_stride, 1), "float32"),
        positions: T.Tensor((s,), "int32"),
        keys: T.Tensor((s, entries, d), "bfloat16"),
        frequencies: T.Tensor((rope // 2,), "float32"),
        scores: T.Tensor((s, entries), "float32"),
    ) -> None:
        with T.Kernel(blocks, s, threads=128, prelude=source()):
            call(
                "index_scores",
                (heads, d, rope, 4, topk),
                *(q, q_stride, w, w_stride, scale, positions, keys, entries, frequencies, scores),
            )

    return index_scores


@tile_kernel({"topk": 512, "s": 1}, {"topk": 16, "s": 2})
def index_topk(topk: int, s: int) -> Any:
    """The best entries, ascending; of equal ones the first."""
    entries = T.dynamic("entries")

    @T.prim_func
    def index_topk(
        scores: T.Tensor((s, entries), "float32"),
        positions: T.Tensor((s,), "int32"),
        chosen: T.Tensor((s, topk), "int32"),
    ) -> None:
        with T.Kernel(s, threads=1024, prelude=source()):
            call("index_topk", (4, topk), scores, positions, entries, chosen)

    return index_topk
