"""The indexer's Walsh-Hadamard transform and its rounding to e2m1."""

from typing import Any

import tilelang.language as T
import torch

from kernels.reference.fp4 import E2M1_MAX, SMALLEST_AMAX
from kernels.scale import from_scale_byte, inverse_of_scale_byte, scale_byte
from kernels.tile import tile_kernel, type_name

_THREADS = 128
_ROWS = 16  # rows, or blocks of values, that one block of threads takes


def _to_e2m1(scaled: Any) -> Any:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to even codes. scaled: float32 from -6 to 6.

    The grid's step is half the power of two below the value, but not under 0.5.
    """
    power = T.reinterpret(T.reinterpret(scaled, "int32") & 0x7F800000, "float32")
    step = T.max(power, T.float32(1.0)) * T.float32(0.5)
    return T.nearbyint(scaled / step) * step


@tile_kernel({"block": 32, "dtype": "bfloat16"}, {"block": 32, "dtype": "float32"})
def fp4_simulate_kernel(block: int, dtype: str) -> Any:
    n = T.dynamic("n")

    @T.prim_func
    def fp4_simulate(x: T.Tensor((n, block), dtype), y: T.Tensor((n, block), dtype)) -> None:
        with T.Kernel(T.ceildiv(n, _ROWS), threads=_THREADS) as part:
            values = T.alloc_fragment((_ROWS, block), "float32")
            amax = T.alloc_fragment((_ROWS,), "float32")
            byte = T.alloc_fragment((_ROWS,), "int32")
            for i, j in T.Parallel(_ROWS, block):
                values[i, j] = T.if_then_else(part * _ROWS + i < n, T.cast(x[part * _ROWS + i, j], "float32"), 0)
            T.reduce_absmax(values, amax, dim=1)
            for i in T.Parallel(_ROWS):
                byte[i] = scale_byte(T.max(amax[i], T.float32(SMALLEST_AMAX)), E2M1_MAX)
            for i, j in T.Parallel(_ROWS, block):
                values[i, j] = _to_e2m1(values[i, j] * inverse_of_scale_byte(byte[i])) * from_scale_byte(byte[i])
            for i, j in T.Parallel(_ROWS, block):
                if part * _ROWS + i < n:
                    y[part * _ROWS + i, j] = T.cast(values[i, j], dtype)

    return fp4_simulate


@tile_kernel({"width": 128, "block": 32, "dtype": "bfloat16"}, {"width": 64, "block": 32, "dtype": "bfloat16"})
def hadamard_fp4_kernel(width: int, block: int, dtype: str) -> Any:
    n, blocks = T.dynamic("n"), width // block
    stages = width.bit_length() - 1

    @T.prim_func
    def hadamard_fp4(x: T.Tensor((n, width), dtype), y: T.Tensor((n, width), dtype)) -> None:
        with T.Kernel(T.ceildiv(n, _ROWS), threads=_THREADS) as part:
            sums = T.alloc_shared((2, _ROWS, width), "float32")
            values = T.alloc_fragment((_ROWS * blocks, block), "float32")
            amax = T.alloc_fragment((_ROWS * blocks,), "float32")
            byte = T.alloc_fragment((_ROWS * blocks,), "int32")
            for i, j in T.Parallel(_ROWS, width):
                sums[0, i, j] = T.if_then_else(part * _ROWS + i < n, T.cast(x[part * _ROWS + i, j], "float32"), 0)
            for stage in T.unroll(stages):
                for i, j in T.Parallel(_ROWS, width):
                    sums[(stage + 1) % 2, i, j] = sums[stage % 2, i, j ^ (1 << stage)] + T.if_then_else(
                        (j >> stage) % 2 == 0, sums[stage % 2, i, j], -sums[stage % 2, i, j]
                    )
            for i, j in T.Parallel(_ROWS * blocks, block):
                # The transform's own rounding, before e2m1's.
                values[i, j] = T.cast(
                    T.cast(sums[stages % 2, i // blocks, i % blocks * block + j] * T.float32(width**-0.5), dtype),
                    "float32",
                )
            T.reduce_absmax(values, amax, dim=1)
            for i in T.Parallel(_ROWS * blocks):
                byte[i] = scale_byte(T.max(amax[i], T.float32(SMALLEST_AMAX)), E2M1_MAX)
            for i, j in T.Parallel(_ROWS * blocks, block):
                values[i, j] = _to_e2m1(values[i, j] * inverse_of_scale_byte(byte[i])) * from_scale_byte(byte[i])
            for i, j in T.Parallel(_ROWS * blocks, block):
                if part * _ROWS + i // blocks < n:
                    y[part * _ROWS + i // blocks, i % blocks * block + j] = T.cast(values[i, j], dtype)

    return hadamard_fp4


def fp4_simulate(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """See `kernels.reference.fp4_simulate`."""
    blocks = x.reshape(-1, block).contiguous()
    y = torch.empty_like(blocks)
    if len(blocks):
        fp4_simulate_kernel(block=block, dtype=type_name(x))(blocks, y)
    return y.view(x.shape)


def hadamard_fp4(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.hadamard_fp4`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = torch.empty_like(rows)
    if len(rows):
        hadamard_fp4_kernel(width=rows.shape[-1], block=32, dtype=type_name(x))(rows, y)
    return y.view(x.shape)
