"""Attention over lists of rows: each block of threads takes a few heads of one query and gathers the rows it names.

An online softmax over short stretches of the list, so that two of them (one computed, one on its way), the queries and
the probabilities fit the 99 KiB of shared memory that a block has on GB10.
"""

from typing import Any

import tilelang.language as T
import torch

from kernels import reference
from kernels.tile import copy, tile_kernel

_STRETCH = 32
"""Rows of a list that are scored at once."""

_LOWEST = -1e30
"""Below every score, yet finite: a stretch without a row leaves sums as they are."""


def sparse_attention(
    q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, topk_idxs: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `kernels.reference.attention.sparse_attention`. q, kv: bfloat16, or float32, which is computed in torch."""
    if q.dtype == torch.float32:
        return reference.sparse_attention(q, kv, sink, topk_idxs, scale)
    m, h, d = q.shape
    o = torch.empty_like(q)
    if m:
        kernel = sparse_attention_kernel(h=h, d=d, scale=scale)
        kernel(q, kv, sink, topk_idxs, o)
    return o


@tile_kernel(
    {"h": 64, "d": 512, "scale": 512**-0.5},
    {"h": 16, "d": 192, "scale": 192**-0.5},
    {"h": 4, "d": 128, "scale": 128**-0.5},
)
def sparse_attention_kernel(h: int, d: int, scale: float) -> Any:
    m, t, j = T.dynamic("m"), T.dynamic("t"), T.dynamic("j")
    heads = 32 if h % 32 == 0 else 16
    threads = 8 * heads

    @T.prim_func
    def sparse_attention(
        q: T.Tensor((m, h, d), "bfloat16"),
        kv: T.Tensor((t, d), "bfloat16"),
        sink: T.Tensor((h,), "float32"),
        topk_idxs: T.Tensor((m, j), "int32"),
        o: T.Tensor((m, h, d), "bfloat16"),
    ) -> None:
        with T.Kernel(T.ceildiv(h, heads), m, threads=threads) as (block, query):
            q_tile = T.alloc_shared((heads, d), "bfloat16")
            rows = T.alloc_shared((_STRETCH, d), "bfloat16")
            p_tile = T.alloc_shared((heads, _STRETCH), "bfloat16")
            scores = T.alloc_fragment((heads, _STRETCH), "float32")
            total = T.alloc_fragment((heads, d), "float32")
            top = T.alloc_fragment((heads,), "float32")
            last_top = T.alloc_fragment((heads,), "float32")
            shrink = T.alloc_fragment((heads,), "float32")
            sums = T.alloc_fragment((heads, _STRETCH), "float32")
            denominator = T.alloc_fragment((heads,), "float32")

            T.clear(total)
            T.clear(sums)
            T.fill(top, _LOWEST)
            copy(q[query, block * heads : (block + 1) * heads, :], q_tile)
            for stretch in T.Pipelined(T.ceildiv(j, _STRETCH), num_stages=2):
                for i, c in T.Parallel(_STRETCH, d):
                    rows[i, c] = kv[T.max(topk_idxs[query, T.min(stretch * _STRETCH + i, j - 1)], 0), c]
                T.gemm(q_tile, rows, scores, transpose_B=True, clear_accum=True)
                for a, i in T.Parallel(heads, _STRETCH):
                    place = stretch * _STRETCH + i
                    is_row = T.if_then_else(place < j, topk_idxs[query, T.min(place, j - 1)] >= 0, False)
                    scores[a, i] = T.if_then_else(is_row, scores[a, i] * scale, -T.infinity("float32"))
                copy(top, last_top)
                T.reduce_max(scores, top, dim=1, clear=False)
                for a in T.Parallel(heads):
                    shrink[a] = T.exp(last_top[a] - top[a])
                for a, i in T.Parallel(heads, _STRETCH):
                    scores[a, i] = T.exp(scores[a, i] - top[a])
                # Each column for itself: threads meet over the denominator once, behind the loop.
                for a, i in T.Parallel(heads, _STRETCH):
                    sums[a, i] = sums[a, i] * shrink[a] + scores[a, i]
                copy(scores, p_tile)
                for a, c in T.Parallel(heads, d):
                    total[a, c] *= shrink[a]
                T.gemm(p_tile, rows, total)
            T.reduce_sum(sums, denominator, dim=1)
            for a in T.Parallel(heads):
                head = T.min(block * heads + a, h - 1)
                denominator[a] += T.exp(sink[head] - top[a])
            for a, c in T.Parallel(heads, d):
                total[a, c] = total[a, c] / denominator[a]
            copy(total, o[query, block * heads : (block + 1) * heads, :])

    return sparse_attention
