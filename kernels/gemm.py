"""Products with dense weights: tiles of both operands in shared memory as bfloat16, sums in float32.

Rounded activations, q * scale, and decoded weights are exact in bfloat16, so only the order of the sum differs from
the twin's. A row's sum goes through k in one order, whatever the other rows are.
"""

import math
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch
import torch.nn.functional as F

from kernels.codes import PRELUDE
from kernels.experts import fp4_rows
from kernels.reference.dequant import FP8_BLOCK
from kernels.reference.scale import decode_scale
from kernels.tile import copy, tile_kernel, type_name

_BLOCK_N, _BLOCK_K, _THREADS = 128, 64, 256
_CODES = 16
"""FP8 codes that a thread decodes at a time."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """FP8 weights of one input, one above the other, as stored.

    weight: float8_e4m3fn [n, k]; scale: uint8 [n / rows_per_scale, k / 128], exponents; row r has scale row
    r // rows_per_scale.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    rows_per_scale: int

    def __getitem__(self, rows: slice) -> "Fp8Weight":
        """A view of some rows, from a multiple of `rows_per_scale` on."""
        begin, end, _ = rows.indices(len(self.weight))
        scales = self.scale[begin // self.rows_per_scale : -(-end // self.rows_per_scale)]
        return Fp8Weight(self.weight[rows], scales, self.rows_per_scale)

    def dequantised(self) -> torch.Tensor:
        """float32 [n, k], exact."""
        scale = decode_scale(self.scale.view(torch.float8_e8m0fnu)).repeat_interleave(self.rows_per_scale, 0)
        return self.weight.float() * scale.repeat_interleave(FP8_BLOCK, 1)


def prepare_fp8(*weights: tuple[torch.Tensor, torch.Tensor]) -> Fp8Weight:
    """See `kernels.reference.linear.prepare_fp8`; n must be a multiple of 16 and k of 128."""
    rows = math.gcd(FP8_BLOCK, *(len(weight) for weight, _ in weights))
    assert rows % 16 == 0, "rows of an FP8 weight come in multiples of 16"
    scales = [
        scale.view(torch.uint8).repeat_interleave(FP8_BLOCK // rows, 0)[: len(weight) // rows]
        for weight, scale in weights
    ]
    codes = torch.cat([weight.view(torch.uint8) for weight, _ in weights])
    return Fp8Weight(codes.view(torch.float8_e4m3fn), torch.cat(scales), rows)


def fp8_linear(x: torch.Tensor, weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.reference.linear.fp8_linear`. x is bfloat16, or float32 for products in true float32."""
    if x.dtype == torch.float32:
        assert not torch.backends.cuda.matmul.allow_tf32, "float32 products must not be rounded to TF32"
        return F.linear(x, weight.dequantised()).type(dtype)
    n, k = weight.weight.shape
    rows = x.reshape(-1, k).contiguous()
    y = torch.empty(len(rows), n, dtype=dtype, device=x.device)
    if len(rows):
        sizes = {"n": n, "k": k, "rows_per_scale": weight.rows_per_scale, "block_m": _block_m(len(rows))}
        fp8_linear_kernel(**sizes, dtype=type_name(y))(rows, weight.weight.view(torch.uint8), weight.scale, y)
    return y.view(*x.shape[:-1], n)


def float_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.linear.float_linear`. bfloat16, or float32 for products in true float32."""
    if x.dtype == torch.float32:
        assert not torch.backends.cuda.matmul.allow_tf32, "float32 products must not be rounded to TF32"
        return F.linear(x, weight.float())
    n, k = weight.shape
    rows = x.reshape(-1, k).contiguous()
    y = torch.empty(len(rows), n, dtype=torch.float32, device=x.device)
    if len(rows):
        float_linear_kernel(n=n, k=k, block_m=_block_m(len(rows)))(rows, weight, y)
    return y.view(*x.shape[:-1], n)


def fp8_gemm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.gemm.fp8_gemm`."""
    return fp8_linear(_activations(a, a_scale), prepare_fp8((w, w_scale)), torch.bfloat16)


def fp4_gemm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.gemm.fp4_gemm`."""
    record = torch.cat((w.view(torch.uint8).flatten(), w_scale.view(torch.uint8).flatten()))
    return fp4_rows(_activations(a, a_scale), record, len(w))


def _activations(a: torch.Tensor, a_scale: torch.Tensor) -> torch.Tensor:
    blocks = a.float().unflatten(-1, (a_scale.shape[-1], -1))
    return (blocks * decode_scale(a_scale).unsqueeze(-1)).flatten(-2).bfloat16()


def _block_m(m: int) -> int:
    return 64 if m <= 64 else 128


@tile_kernel(
    {"n": 1536, "k": 4096, "rows_per_scale": 128, "block_m": 128, "dtype": "bfloat16"},
    {"n": 4096, "k": 2048, "rows_per_scale": 128, "block_m": 64, "dtype": "float32"},
    {"n": 208, "k": 128, "rows_per_scale": 16, "block_m": 64, "dtype": "bfloat16"},
)
def fp8_linear_kernel(n: int, k: int, rows_per_scale: int, block_m: int, dtype: str) -> Any:
    m = T.dynamic("m")
    per_row = _BLOCK_K // _CODES

    @T.prim_func
    def fp8_linear(
        x: T.Tensor((m, k), "bfloat16"),
        weight: T.Tensor((n, k), "uint8"),
        scale: T.Tensor((n // rows_per_scale, k // FP8_BLOCK), "uint8"),
        y: T.Tensor((m, n), dtype),
    ) -> None:
        # Neighbouring blocks share weights, so that these are read from memory once.
        with T.Kernel(T.ceildiv(m, block_m), T.ceildiv(n, _BLOCK_N), threads=_THREADS, prelude=PRELUDE) as (bm, bn):
            x_tile = T.alloc_shared((block_m, _BLOCK_K), "bfloat16")
            stored = T.alloc_shared((_BLOCK_N, _BLOCK_K), "uint8")
            tile = T.alloc_shared((_BLOCK_N, _BLOCK_K), "bfloat16")
            codes = T.alloc_local((_CODES,), "uint8")
            values = T.alloc_local((_CODES,), "bfloat16")
            total = T.alloc_fragment((block_m, _BLOCK_N), "float32")
            thread = T.get_thread_binding()
            T.clear(total)
            for step in T.Pipelined(k // _BLOCK_K, num_stages=2):
                copy(x[bm * block_m, step * _BLOCK_K], x_tile)
                copy(weight[bn * _BLOCK_N, step * _BLOCK_K], stored)
                for i in T.unroll(_BLOCK_N * per_row // _THREADS):
                    row = (i * _THREADS + thread) // per_row
                    column = (i * _THREADS + thread) % per_row * _CODES
                    for v in T.vectorized(_CODES):
                        codes[v] = stored[row, column + v]
                    scale_row = T.min(bn * _BLOCK_N + row, n - 1) // rows_per_scale
                    factor = scale[scale_row, step * _BLOCK_K // FP8_BLOCK]
                    T.call_extern("handle", "fp8_to_bf16", T.address_of(values[0]), T.address_of(codes[0]), factor)
                    for half in T.unroll(2):
                        for v in T.vectorized(8):
                            tile[row, column + half * 8 + v] = values[half * 8 + v]
                T.gemm(x_tile, tile, total, transpose_B=True)
            copy(total, y[bm * block_m, bn * _BLOCK_N])

    return fp8_linear


@tile_kernel({"n": 2048, "k": 4096, "block_m": 128}, {"n": 16, "k": 128, "block_m": 64})
def float_linear_kernel(n: int, k: int, block_m: int) -> Any:
    m = T.dynamic("m")

    @T.prim_func
    def float_linear(
        x: T.Tensor((m, k), "bfloat16"), weight: T.Tensor((n, k), "bfloat16"), y: T.Tensor((m, n), "float32")
    ) -> None:
        with T.Kernel(T.ceildiv(m, block_m), T.ceildiv(n, _BLOCK_N), threads=_THREADS) as (bm, bn):
            x_tile = T.alloc_shared((block_m, _BLOCK_K), "bfloat16")
            tile = T.alloc_shared((_BLOCK_N, _BLOCK_K), "bfloat16")
            total = T.alloc_fragment((block_m, _BLOCK_N), "float32")
            T.clear(total)
            for step in T.Pipelined(k // _BLOCK_K, num_stages=2):
                copy(x[bm * block_m, step * _BLOCK_K], x_tile)
                copy(weight[bn * _BLOCK_N, step * _BLOCK_K], tile)
                T.gemm(x_tile, tile, total, transpose_B=True)
            copy(total, y[bm * block_m, bn * _BLOCK_N])

    return float_linear
