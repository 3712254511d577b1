"""Activation quantisation: blocks of consecutive values, one power-of-two scale each, taken from the bits."""

from typing import Any

import tilelang.language as T
import torch

from kernels.reference.fp8 import E4M3_MAX, SMALLEST_AMAX
from kernels.scale import from_scale_byte, inverse_of_scale_byte, scale_byte
from kernels.tile import tile_kernel, type_name

_THREADS = 128
_BLOCKS = 16  # blocks of values that one block of threads takes


@tile_kernel({"block": 128, "dtype": "bfloat16"}, {"block": 128, "dtype": "float32"})
def act_quant_kernel(block: int, dtype: str) -> Any:
    n = T.dynamic("n")

    @T.prim_func
    def act_quant(
        x: T.Tensor((n, block), dtype), q: T.Tensor((n, block), "float8_e4m3fn"), scale: T.Tensor((n,), "uint8")
    ) -> None:
        with T.Kernel(T.ceildiv(n, _BLOCKS), threads=_THREADS) as part:
            values = T.alloc_fragment((_BLOCKS, block), "float32")
            amax = T.alloc_fragment((_BLOCKS,), "float32")
            byte = T.alloc_fragment((_BLOCKS,), "int32")
            for i, j in T.Parallel(_BLOCKS, block):
                values[i, j] = T.if_then_else(part * _BLOCKS + i < n, T.cast(x[part * _BLOCKS + i, j], "float32"), 0)
            T.reduce_absmax(values, amax, dim=1)
            for i in T.Parallel(_BLOCKS):
                byte[i] = scale_byte(T.max(amax[i], SMALLEST_AMAX), E4M3_MAX)
            for i in T.Parallel(_BLOCKS):
                if part * _BLOCKS + i < n:
                    scale[part * _BLOCKS + i] = T.cast(byte[i], "uint8")
            for i, j in T.Parallel(_BLOCKS, block):
                if part * _BLOCKS + i < n:
                    q[part * _BLOCKS + i, j] = T.cast(values[i, j] * inverse_of_scale_byte(byte[i]), "float8_e4m3fn")

    return act_quant


@tile_kernel({"block": 128, "dtype": "bfloat16"}, {"block": 64, "dtype": "bfloat16"})
def act_round_kernel(block: int, dtype: str) -> Any:
    n = T.dynamic("n")

    @T.prim_func
    def act_round(x: T.Tensor((n, block), dtype), y: T.Tensor((n, block), "bfloat16")) -> None:
        with T.Kernel(T.ceildiv(n, _BLOCKS), threads=_THREADS) as part:
            values = T.alloc_fragment((_BLOCKS, block), "float32")
            codes = T.alloc_fragment((_BLOCKS, block), "float8_e4m3fn")
            amax = T.alloc_fragment((_BLOCKS,), "float32")
            byte = T.alloc_fragment((_BLOCKS,), "int32")
            for i, j in T.Parallel(_BLOCKS, block):
                values[i, j] = T.if_then_else(part * _BLOCKS + i < n, T.cast(x[part * _BLOCKS + i, j], "float32"), 0)
            T.reduce_absmax(values, amax, dim=1)
            for i in T.Parallel(_BLOCKS):
                byte[i] = scale_byte(T.max(amax[i], SMALLEST_AMAX), E4M3_MAX)
            for i, j in T.Parallel(_BLOCKS, block):
                codes[i, j] = T.cast(values[i, j] * inverse_of_scale_byte(byte[i]), "float8_e4m3fn")
            for i, j in T.Parallel(_BLOCKS, block):
                if part * _BLOCKS + i < n:
                    y[part * _BLOCKS + i, j] = T.cast(
                        T.cast(codes[i, j], "float32") * from_scale_byte(byte[i]), "bfloat16"
                    )

    return act_round


def act_quant(x: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.act_quant`."""
    blocks = x.reshape(-1, block).contiguous()
    q = torch.empty(blocks.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(len(blocks), dtype=torch.uint8, device=x.device)
    if len(blocks):
        act_quant_kernel(block=block, dtype=type_name(x))(blocks, q, scale)
    return q.view(x.shape), scale.view(torch.float8_e8m0fnu).view(*x.shape[:-1], x.shape[-1] // block)


def act_round(x: torch.Tensor, block: int = 128) -> torch.Tensor:
    """See `kernels.reference.act_round`; here in bfloat16, which holds every e4m3 value times a power of two."""
    blocks = x.reshape(-1, block).contiguous()
    y = torch.empty(blocks.shape, dtype=torch.bfloat16, device=x.device)
    if len(blocks):
        act_round_kernel(block=block, dtype=type_name(x))(blocks, y)
    return y.view(x.shape)


def fp8_simulate(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """See `kernels.reference.fp8_simulate`."""
    return act_round(x, block).type(x.dtype)
