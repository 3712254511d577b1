"""Pools groups of tokens into entries: a thread a channel, two passes over the group."""

import math
from typing import Any

import tilelang.language as T
import torch

from kernels.tile import tile_kernel

_THREADS = 128


@tile_kernel(
    {"tokens": 128, "d": 512, "overlapping": False},
    {"tokens": 4, "d": 512, "overlapping": True},
    {"tokens": 4, "d": 64, "overlapping": True},
)
def compress_kernel(tokens: int, d: int, overlapping: bool) -> Any:
    """With overlap there is one group more than entries, twice as wide; an entry's first `tokens` rows are those of
    the group before it."""
    n, groups = T.dynamic("n"), T.dynamic("groups")
    rows, width = tokens * (1 + overlapping), d * (1 + overlapping)
    channels = math.gcd(d, _THREADS)

    @T.prim_func
    def compress(
        kv: T.Tensor((groups, tokens, width), "float32"),
        gate: T.Tensor((groups, tokens, width), "float32"),
        entries: T.Tensor((n, d), "float32"),
    ) -> None:
        with T.Kernel(n, d // channels, threads=channels) as (entry, part):
            top = T.alloc_fragment((channels,), "float32")
            weight = T.alloc_fragment((channels,), "float32")
            total = T.alloc_fragment((channels,), "float32")
            pooled = T.alloc_fragment((channels,), "float32")
            T.fill(top, -T.infinity("float32"))
            T.clear(total)
            T.clear(pooled)
            for t in T.serial(rows):
                for c in T.Parallel(channels):
                    group, column = entry + t // tokens, part * channels + c + t // tokens * d
                    top[c] = T.max(top[c], gate[group, t % tokens, column])
            for t in T.serial(rows):
                for c in T.Parallel(channels):
                    group, column = entry + t // tokens, part * channels + c + t // tokens * d
                    weight[c] = T.exp(gate[group, t % tokens, column] - top[c])
                    total[c] += weight[c]
                    pooled[c] += weight[c] * kv[group, t % tokens, column]
            for c in T.Parallel(channels):
                entries[entry, part * channels + c] = pooled[c] / total[c]

    return compress


def compress(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.compress`."""
    n, tokens, d = kv.shape
    entries = torch.empty(n, d, device=kv.device)
    if n:
        compress_kernel(tokens=tokens, d=d, overlapping=False)(kv.contiguous(), gate.contiguous(), entries)
    return entries


def compress_overlapping(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.compress_overlapping`."""
    groups, tokens, width = kv.shape
    entries = torch.empty(groups - 1, width // 2, device=kv.device)
    if len(entries):
        compress_kernel(tokens=tokens, d=width // 2, overlapping=True)(kv.contiguous(), gate.contiguous(), entries)
    return entries
