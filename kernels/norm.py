"""Root-mean-square normalisation of rows, one block of threads a row; each thread has as many values."""

import math
from typing import Any

import tilelang.language as T
import torch

from kernels.tile import tile_kernel, type_name

_THREADS = 128


@tile_kernel({"d": 512, "dtype": "bfloat16", "eps": 1e-6}, {"d": 4096, "dtype": "bfloat16", "eps": 1e-6})
def rms_norm_kernel(d: int, dtype: str, eps: float) -> Any:
    m, threads = T.dynamic("m"), math.gcd(d, _THREADS)

    @T.prim_func
    def rms_norm(x: T.Tensor((m, d), dtype), weight: T.Tensor((d,), "float32"), y: T.Tensor((m, d), dtype)) -> None:
        with T.Kernel(m, threads=threads) as row:
            values = T.alloc_fragment((d,), "float32")
            squares = T.alloc_fragment((d,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for i in T.Parallel(d):
                values[i] = T.cast(x[row, i], "float32")
            for i in T.Parallel(d):
                squares[i] = values[i] * values[i]
            T.reduce_sum(squares, total, dim=0)
            for i in T.Parallel(d):
                y[row, i] = T.cast(values[i] * T.rsqrt(total[0] / d + eps) * weight[i], dtype)

    return rms_norm


@tile_kernel({"d": 512, "dtype": "bfloat16", "eps": 1e-6}, {"d": 128, "dtype": "float32", "eps": 1e-6})
def head_norm_kernel(d: int, dtype: str, eps: float) -> Any:
    m, threads = T.dynamic("m"), math.gcd(d, _THREADS)

    def rounded(value: Any) -> Any:
        return T.cast(T.cast(value, dtype), "float32")

    @T.prim_func
    def head_norm(x: T.Tensor((m, d), dtype), y: T.Tensor((m, d), dtype)) -> None:
        with T.Kernel(m, threads=threads) as row:
            values = T.alloc_fragment((d,), "float32")
            squares = T.alloc_fragment((d,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for i in T.Parallel(d):
                values[i] = T.cast(x[row, i], "float32")
            for i in T.Parallel(d):
                squares[i] = rounded(values[i] * values[i])
            T.reduce_sum(squares, total, dim=0)
            for i in T.Parallel(d):
                factor = rounded(T.rsqrt(rounded(rounded(total[0] / d) + T.float32(eps))))
                y[row, i] = T.cast(values[i] * factor, dtype)

    return head_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = torch.empty_like(rows)
    if len(rows):
        rms_norm_kernel(d=rows.shape[-1], dtype=type_name(x), eps=eps)(rows, weight, y)
    return y.view(x.shape)


def head_norm(q: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.head_norm`."""
    rows = q.reshape(-1, q.shape[-1]).contiguous()
    y = torch.empty_like(rows)
    if len(rows):
        head_norm_kernel(d=rows.shape[-1], dtype=type_name(q), eps=eps)(rows, y)
    return y.view(q.shape)
