"""Scores each token's experts and chooses the best few, one block of threads a token."""

from typing import Any

import tilelang.language as T
import torch
import torch.nn.functional as F

from kernels.gemm import float_linear
from kernels.tile import tile_kernel

_THREADS = 64


@tile_kernel({"experts": 256, "topk": 6}, {"experts": 24, "topk": 4}, {"experts": 16, "topk": 4})
def route_by_score_kernel(experts: int, topk: int) -> Any:
    """Threads divide a power of two of places, the last of which may be nobody's."""
    m, places = T.dynamic("m"), 1 << (experts - 1).bit_length()

    @T.prim_func
    def route_by_score(
        scores: T.Tensor((m, experts), "float32"),
        bias: T.Tensor((experts,), "float32"),
        topk_ids: T.Tensor((m, topk), "int64"),
    ) -> None:
        with T.Kernel(m, threads=_THREADS) as token:
            left = T.alloc_fragment((places,), "float32")
            candidates = T.alloc_fragment((places,), "int32")
            best = T.alloc_fragment((1,), "float32")
            chosen = T.alloc_fragment((1,), "int32")
            for i in T.Parallel(places):
                # The maximum turns NaN into a number, so that every choice is an expert, and another one.
                left[i] = T.if_then_else(
                    i < experts, T.max(scores[token, i] + bias[i], T.float32(-3e38)), -T.infinity("float32")
                )
            for k in T.serial(topk):
                T.reduce_max(left, best, dim=0)
                for i in T.Parallel(places):
                    candidates[i] = T.if_then_else(left[i] == best[0], i, places)
                T.reduce_min(candidates, chosen, dim=0)
                for i in T.Parallel(places):
                    left[i] = T.if_then_else(i == chosen[0], -T.infinity("float32"), left[i])
                for i in T.Parallel(1):
                    topk_ids[token, k + i] = T.cast(chosen[0], "int64")

    return route_by_score


def router_scores(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.router_scores`."""
    return F.softplus(float_linear(x, gate)).sqrt()


def route_by_score(scores: torch.Tensor, bias: torch.Tensor, topk: int) -> torch.Tensor:
    """See `kernels.reference.route_by_score`."""
    topk_ids = torch.empty(len(scores), topk, dtype=torch.int64, device=scores.device)
    if len(scores):
        route_by_score_kernel(experts=scores.shape[-1], topk=topk)(scores, bias, topk_ids)
    return topk_ids
