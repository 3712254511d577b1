"""The MLPs of many experts at once, each on its own rows, with weights read where they lie: in the records of slots.

A block of threads computes one tile of rows of one expert, so one launch covers a whole wave. Operands of the next step
come into registers while the tensor cores work on this one. Rows are summed in one order, whatever the tile.
"""

from collections.abc import Sequence
from typing import Any

import tilelang.language as T
import torch

from kernels.codes import PRELUDE
from kernels.reference.dequant import FP4_BLOCK
from kernels.reference.experts import ExpertRows
from kernels.reference.fp8 import E4M3_MAX, SMALLEST_AMAX
from kernels.scale import from_scale_byte, inverse_of_scale_byte, scale_byte
from kernels.tile import tile_kernel

_BLOCK_M, _BLOCK_N, _BLOCK_K, _THREADS = 64, 128, 64, 256
_VECTOR = 8
"""bfloat16 values that a thread moves at once."""
_PER_ROW = _BLOCK_K // _VECTOR
_LOADS = _BLOCK_M * _PER_ROW // _THREADS


def expert_mlp(
    x: torch.Tensor,
    tokens: torch.Tensor,
    routing: torch.Tensor,
    experts: Sequence[ExpertRows],
    width: int,
    limit: float,
    out: torch.Tensor,
) -> None:
    """See `kernels.reference.experts.expert_mlp`. x, out: bfloat16. The records must lie at multiples of 16 bytes."""
    if not experts:
        return
    tiles = _tiles(experts, x.device)
    inner = torch.empty(len(tokens), width, dtype=torch.bfloat16, device=x.device)
    hidden = x.shape[-1]
    gate_up_kernel(hidden=hidden, width=width, limit=limit)(x, tokens, routing, tiles, inner)
    weight_bytes, scale_bytes = width * hidden // 2, width * hidden // FP4_BLOCK
    down_kernel(n=hidden, k=width, offset=2 * (weight_bytes + scale_bytes))(inner, tiles, out)


def expert_sum(rows: torch.Tensor, places: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.experts.expert_sum`. rows, shared: bfloat16; places: int32."""
    out = torch.empty_like(shared)
    if len(shared):
        expert_sum_kernel(hidden=shared.shape[-1], topk=places.shape[-1])(rows, places, shared, out)
    return out


def fp4_rows(x: torch.Tensor, record: torch.Tensor, n: int) -> torch.Tensor:
    """x @ w^T in bfloat16 [m, n]. x: bfloat16 [m, k]; record: uint8, codes [n, k/2] and then scales [n, k/32]."""
    out = torch.empty(len(x), n, dtype=torch.bfloat16, device=x.device)
    if len(x):
        tiles = _tiles([ExpertRows(record, 0, len(x))], x.device)
        down_kernel(n=n, k=x.shape[-1], offset=0)(x, tiles, out)
    return out


def _tiles(experts: Sequence[ExpertRows], device: torch.device) -> torch.Tensor:
    """int64 [tiles, 3]: where a tile's record begins, its first row and the end of its expert's rows."""
    tiles = [
        (expert.record.data_ptr(), begin, expert.end)
        for expert in experts
        for begin in range(expert.begin, expert.end, _BLOCK_M)
    ]
    return torch.tensor(tiles, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


@T.macro
def _fetch_rows(next_x: Any, x: Any, row_of: Any, column: Any) -> None:
    """This thread's values of the rows `row_of`, from `column` on."""
    for i in T.unroll(_LOADS):
        for v in T.vectorized(_VECTOR):
            next_x[i, v] = x[row_of[i], column + v]


@T.macro
def _store_rows(next_x: Any, tile: Any, row: Any, column: Any) -> None:
    for i in T.unroll(_LOADS):
        for v in T.vectorized(_VECTOR):
            tile[i * (_BLOCK_M // _LOADS) + row, column + v] = next_x[i, v]


@T.macro
def _fetch_codes(packed: Any, scales: Any, i: int, codes: Any, scale: Any) -> None:
    """This thread's 32 codes and their scale, from raw addresses into registers."""
    T.call_extern("handle", "load_16", T.address_of(packed[i, 0]), codes)
    scales[i] = T.call_extern("uint8", "load_1", scale)


@T.macro
def _unpack(packed: Any, scales: Any, i: int, values: Any, tile: Any, row: Any, column: Any) -> None:
    """Decode them into a row of a tile."""
    T.call_extern("handle", "fp4_to_bf16", T.address_of(values[0]), T.address_of(packed[i, 0]), scales[i])
    for chunk in T.unroll(FP4_BLOCK // _VECTOR):
        for v in T.vectorized(_VECTOR):
            tile[row, column + chunk * _VECTOR + v] = values[chunk * _VECTOR + v]


@tile_kernel({"hidden": 4096, "width": 2048, "limit": 10.0}, {"hidden": 128, "width": 128, "limit": 10.0})
def gate_up_kernel(hidden: int, width: int, limit: float) -> Any:
    """Products with w1 and w3, the gated activation with the routing weight, rounded as w2 wants it."""
    m, rows, num_tiles = T.dynamic("m"), T.dynamic("rows"), T.dynamic("num_tiles")
    steps = hidden // _BLOCK_K
    row_bytes, row_scales = hidden // 2, hidden // FP4_BLOCK
    w1_scale = width * row_bytes
    w3 = w1_scale + width * row_scales
    w3_scale = w3 + width * row_bytes

    @T.prim_func
    def gate_up(
        x: T.Tensor((m, hidden), "bfloat16"),
        tokens: T.Tensor((rows,), "int32"),
        routing: T.Tensor((rows,), "float32"),
        tiles: T.Tensor((num_tiles, 3), "int64"),
        inner: T.Tensor((rows, width), "bfloat16"),
    ) -> None:
        with T.Kernel(width // _BLOCK_N, num_tiles, threads=_THREADS, prelude=PRELUDE) as (bn, bt):
            x_tile = T.alloc_shared((_BLOCK_M, _BLOCK_K), "bfloat16")
            w1_tile = T.alloc_shared((_BLOCK_N, _BLOCK_K), "bfloat16")
            w3_tile = T.alloc_shared((_BLOCK_N, _BLOCK_K), "bfloat16")
            gate = T.alloc_fragment((_BLOCK_M, _BLOCK_N), "float32")
            up = T.alloc_fragment((_BLOCK_M, _BLOCK_N), "float32")
            amax = T.alloc_fragment((_BLOCK_M,), "float32")
            byte = T.alloc_fragment((_BLOCK_M,), "int32")
            codes = T.alloc_fragment((_BLOCK_M, _BLOCK_N), "float8_e4m3fn")
            token = T.alloc_local((_LOADS,), "int32")
            next_x = T.alloc_local((_LOADS, _VECTOR), "bfloat16")
            packed = T.alloc_local((2, 16), "uint8")
            scales = T.alloc_local((2,), "uint8")
            values = T.alloc_local((FP4_BLOCK,), "bfloat16")
            thread = T.get_thread_binding()
            x_row, x_column = thread // _PER_ROW, thread % _PER_ROW * _VECTOR
            row, half = thread // 2, thread % 2
            begin, end = tiles[bt, 1], tiles[bt, 2]
            weight = tiles[bt, 0] + (bn * _BLOCK_N + row) * row_bytes + half * 16
            scale = tiles[bt, 0] + (bn * _BLOCK_N + row) * row_scales + half

            T.clear(gate)
            T.clear(up)
            for i in T.unroll(_LOADS):
                token[i] = tokens[T.min(begin + i * (_BLOCK_M // _LOADS) + x_row, end - 1)]
            _fetch_rows(next_x, x, token, x_column)
            _fetch_codes(packed, scales, 0, weight, scale + w1_scale)
            _fetch_codes(packed, scales, 1, weight + w3, scale + w3_scale)
            for step in T.serial(steps):
                _store_rows(next_x, x_tile, x_row, x_column)
                _unpack(packed, scales, 0, values, w1_tile, row, half * FP4_BLOCK)
                _unpack(packed, scales, 1, values, w3_tile, row, half * FP4_BLOCK)
                ahead = T.min(step + 1, steps - 1)
                _fetch_rows(next_x, x, token, ahead * _BLOCK_K + x_column)
                _fetch_codes(packed, scales, 0, weight + ahead * 32, scale + w1_scale + ahead * 2)
                _fetch_codes(packed, scales, 1, weight + w3 + ahead * 32, scale + w3_scale + ahead * 2)
                T.gemm(x_tile, w1_tile, gate, transpose_B=True)
                T.gemm(x_tile, w3_tile, up, transpose_B=True)

            for i, j in T.Parallel(_BLOCK_M, _BLOCK_N):
                g = T.min(T.cast(T.cast(gate[i, j], "bfloat16"), "float32"), limit)
                u = T.max(T.min(T.cast(T.cast(up[i, j], "bfloat16"), "float32"), limit), -limit)
                weighted = g / (1.0 + T.exp(-g)) * u * routing[T.min(begin + i, end - 1)]
                gate[i, j] = T.cast(T.cast(weighted, "bfloat16"), "float32")
            T.reduce_absmax(gate, amax, dim=1)
            for i in T.Parallel(_BLOCK_M):
                byte[i] = scale_byte(T.max(amax[i], SMALLEST_AMAX), E4M3_MAX)
            for i, j in T.Parallel(_BLOCK_M, _BLOCK_N):
                codes[i, j] = T.cast(gate[i, j] * inverse_of_scale_byte(byte[i]), "float8_e4m3fn")
            for i, j in T.Parallel(_BLOCK_M, _BLOCK_N):
                if begin + i < end:
                    inner[begin + i, bn * _BLOCK_N + j] = T.cast(
                        T.cast(codes[i, j], "float32") * from_scale_byte(byte[i]), "bfloat16"
                    )

    return gate_up


@tile_kernel({"n": 4096, "k": 2048, "offset": 2 * 2048 * 4096 * 17 // 32}, {"n": 128, "k": 128, "offset": 0})
def down_kernel(n: int, k: int, offset: int) -> Any:
    """Products with one FP4 weight, which begins `offset` bytes behind a tile's address."""
    rows, num_tiles = T.dynamic("rows"), T.dynamic("num_tiles")
    steps = k // _BLOCK_K
    row_bytes, row_scales = k // 2, k // FP4_BLOCK

    @T.prim_func
    def down(
        x: T.Tensor((rows, k), "bfloat16"),
        tiles: T.Tensor((num_tiles, 3), "int64"),
        out: T.Tensor((rows, n), "bfloat16"),
    ) -> None:
        with T.Kernel(n // _BLOCK_N, num_tiles, threads=_THREADS, prelude=PRELUDE) as (bn, bt):
            x_tile = T.alloc_shared((_BLOCK_M, _BLOCK_K), "bfloat16")
            tile = T.alloc_shared((_BLOCK_N, _BLOCK_K), "bfloat16")
            total = T.alloc_fragment((_BLOCK_M, _BLOCK_N), "float32")
            place = T.alloc_local((_LOADS,), "int32")
            next_x = T.alloc_local((_LOADS, _VECTOR), "bfloat16")
            packed = T.alloc_local((1, 16), "uint8")
            scales = T.alloc_local((1,), "uint8")
            values = T.alloc_local((FP4_BLOCK,), "bfloat16")
            thread = T.get_thread_binding()
            x_row, x_column = thread // _PER_ROW, thread % _PER_ROW * _VECTOR
            row, half = thread // 2, thread % 2
            begin, end = tiles[bt, 1], tiles[bt, 2]
            weight = tiles[bt, 0] + offset + (bn * _BLOCK_N + row) * row_bytes + half * 16
            scale = tiles[bt, 0] + offset + n * row_bytes + (bn * _BLOCK_N + row) * row_scales + half

            T.clear(total)
            for i in T.unroll(_LOADS):
                place[i] = T.cast(T.min(begin + i * (_BLOCK_M // _LOADS) + x_row, end - 1), "int32")
            _fetch_rows(next_x, x, place, x_column)
            _fetch_codes(packed, scales, 0, weight, scale)
            for step in T.serial(steps):
                _store_rows(next_x, x_tile, x_row, x_column)
                _unpack(packed, scales, 0, values, tile, row, half * FP4_BLOCK)
                ahead = T.min(step + 1, steps - 1)
                _fetch_rows(next_x, x, place, ahead * _BLOCK_K + x_column)
                _fetch_codes(packed, scales, 0, weight + ahead * 32, scale + ahead * 2)
                T.gemm(x_tile, tile, total, transpose_B=True)
            for i, j in T.Parallel(_BLOCK_M, _BLOCK_N):
                if begin + i < end:
                    out[begin + i, bn * _BLOCK_N + j] = T.cast(total[i, j], "bfloat16")

    return down


@tile_kernel({"hidden": 4096, "topk": 6}, {"hidden": 128, "topk": 4})
def expert_sum_kernel(hidden: int, topk: int) -> Any:
    m, rows = T.dynamic("m"), T.dynamic("rows")

    @T.prim_func
    def expert_sum(
        outputs: T.Tensor((rows, hidden), "bfloat16"),
        places: T.Tensor((m, topk), "int32"),
        shared: T.Tensor((m, hidden), "bfloat16"),
        out: T.Tensor((m, hidden), "bfloat16"),
    ) -> None:
        with T.Kernel(m, threads=128) as token:
            total = T.alloc_fragment((hidden,), "float32")
            T.clear(total)
            for expert in T.serial(topk):
                for i in T.Parallel(hidden):
                    total[i] += T.cast(outputs[places[token, expert], i], "float32")
            for i in T.Parallel(hidden):
                out[token, i] = T.cast(total[i] + T.cast(shared[token, i], "float32"), "bfloat16")

    return expert_sum
