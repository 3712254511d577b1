"""Scores of compressed entries: every block of threads keeps a tile of entries and passes the queries by it."""

from typing import Any

import tilelang.language as T
import torch

from kernels import reference
from kernels.tile import tile_kernel

_ENTRIES, _QUERIES = 128, 8
"""Of a block of threads."""


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.indexer.index_scores`. q, k, weights: bfloat16, or float32, which is computed in torch."""
    if q.dtype == torch.float32:
        return reference.index_scores(q, k, weights)
    (m, h, d), t = q.shape, len(k)
    scores = torch.empty(m, t, dtype=torch.float32, device=q.device)
    if m and t:
        index_scores_kernel(h=h, d=d)(q.view(m * h, d), k, weights, scores)
    return scores


@tile_kernel({"h": 64, "d": 128}, {"h": 16, "d": 64})
def index_scores_kernel(h: int, d: int) -> Any:
    m, t = T.dynamic("m"), T.dynamic("t")

    @T.prim_func
    def index_scores(
        q: T.Tensor((m * h, d), "bfloat16"),
        k: T.Tensor((t, d), "bfloat16"),
        weights: T.Tensor((m, h), "bfloat16"),
        scores: T.Tensor((m, t), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(t, _ENTRIES), T.ceildiv(m, _QUERIES), threads=128) as (block, group):
            k_tile = T.alloc_shared((_ENTRIES, d), "bfloat16")
            q_tile = T.alloc_shared((h, d), "bfloat16")
            dots = T.alloc_fragment((_ENTRIES, h), "float32")
            total = T.alloc_fragment((_ENTRIES,), "float32")
            T.copy(k[block * _ENTRIES, 0], k_tile)
            for i in T.Pipelined(_QUERIES, num_stages=2):
                query = group * _QUERIES + i
                T.copy(q[query * h, 0], q_tile)
                T.gemm(k_tile, q_tile, dots, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                for entry, head in T.Parallel(_ENTRIES, h):
                    weight = T.cast(weights[T.min(query, m - 1), head], "float32")
                    dots[entry, head] = T.max(dots[entry, head], 0.0) * weight
                T.reduce_sum(dots, total, dim=1)
                for entry in T.Parallel(_ENTRIES):
                    if query < m and block * _ENTRIES + entry < t:
                        scores[query, block * _ENTRIES + entry] = total[entry]

    return index_scores
