"""Scores of compressed entries, every block of threads passing queries by its tile of entries, and the best of them."""

from pathlib import Path
from typing import Any

import tilelang.language as T
import torch

from kernels import reference
from kernels.tile import copy, tile_kernel

_ENTRIES, _QUERIES = 128, 8
"""Of a block of threads."""

_SELECTION = (Path(__file__).parent / "selection.cuh").read_text(encoding="utf-8")


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.indexer.index_scores`. q, k, weights: bfloat16, or float32, which is computed in torch."""
    if q.dtype == torch.float32:
        return reference.index_scores(q, k, weights)
    (m, h, d), t = q.shape, len(k)
    scores = torch.empty(m, t, dtype=torch.float32, device=q.device)
    if m and t:
        index_scores_kernel(h=h, d=d)(q.view(m * h, d), k, weights, scores)
    return scores


def index_topk(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """See `kernels.reference.indexer.index_topk`."""
    m, t = scores.shape
    if t <= topk:
        return visible
    kept = torch.empty_like(visible)
    if m:
        index_topk_kernel(topk=topk)(scores, visible.view(torch.uint8), kept.view(torch.uint8))
    return kept


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
            copy(k[block * _ENTRIES, 0], k_tile)
            for i in T.Pipelined(_QUERIES, num_stages=2):
                query = group * _QUERIES + i
                copy(q[query * h, 0], q_tile)
                T.gemm(k_tile, q_tile, dots, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                for entry, head in T.Parallel(_ENTRIES, h):
                    weight = T.cast(weights[T.min(query, m - 1), head], "float32")
                    dots[entry, head] = T.max(dots[entry, head], 0.0) * weight
                T.reduce_sum(dots, total, dim=1)
                for entry in T.Parallel(_ENTRIES):
                    if query < m and block * _ENTRIES + entry < t:
                        scores[query, block * _ENTRIES + entry] = total[entry]

    return index_scores


@tile_kernel({"topk": 512})
def index_topk_kernel(topk: int) -> Any:
    m, t = T.dynamic("m"), T.dynamic("t")

    @T.prim_func
    def index_topk(
        scores: T.Tensor((m, t), "float32"), visible: T.Tensor((m, t), "uint8"), kept: T.Tensor((m, t), "uint8")
    ) -> None:
        with T.Kernel(m, threads=1024, prelude=_SELECTION):
            rows = [T.address_of(x[0, 0]) for x in (scores, visible, kept)]
            T.call_extern("handle", "icebox::keep_largest", rows[0], rows[1], t, topk, rows[2])

    return index_topk
