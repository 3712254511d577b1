"""Rotary positions: a block of threads copies a token's rows and turns the pairs at their ends."""

from typing import Any

import tilelang.language as T
import torch

from kernels.tile import tile_kernel, type_name

_THREADS = 128


@tile_kernel(
    {"heads": 64, "d": 512, "half": 32, "inverse": False, "dtype": "bfloat16"},
    {"heads": 1, "d": 512, "half": 32, "inverse": True, "dtype": "bfloat16"},
    {"heads": 16, "d": 64, "half": 32, "inverse": False, "dtype": "float32"},
)
def rope_kernel(heads: int, d: int, half: int, inverse: bool, dtype: str) -> Any:
    m, plain, sign = T.dynamic("m"), d - 2 * half, -1.0 if inverse else 1.0

    @T.prim_func
    def rope(
        x: T.Tensor((m, heads, d), dtype),
        rotation: T.Tensor((m, half, 2), "float32"),
        y: T.Tensor((m, heads, d), dtype),
    ) -> None:
        with T.Kernel(m, threads=_THREADS) as token:
            if plain > 0:
                for h, i in T.Parallel(heads, plain):
                    y[token, h, i] = x[token, h, i]
            for h, i in T.Parallel(heads, half):
                real = T.cast(x[token, h, plain + 2 * i], "float32")
                imaginary = T.cast(x[token, h, plain + 2 * i + 1], "float32")
                cos = rotation[token, i, 0]
                sin = rotation[token, i, 1] * T.float32(sign)
                y[token, h, plain + 2 * i] = T.cast(real * cos - imaginary * sin, dtype)
                y[token, h, plain + 2 * i + 1] = T.cast(real * sin + imaginary * cos, dtype)

    return rope


def rope(x: torch.Tensor, rotation: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """See `kernels.reference.rope`."""
    m, d, half = len(x), x.shape[-1], rotation.shape[-1]
    if x.numel() == 0:
        return x.clone()
    rows = x.reshape(m, -1, d).contiguous()
    y = torch.empty_like(rows)
    kernel = rope_kernel(heads=rows.shape[1], d=d, half=half, inverse=inverse, dtype=type_name(x))
    kernel(rows, torch.view_as_real(rotation).contiguous(), y)
    return y.view(x.shape)
