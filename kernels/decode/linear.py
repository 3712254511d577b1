"""Matrix-vector products of a decode step: a block of threads has 16 rows, its warps share the inputs."""

from typing import Any

import tilelang.language as T

from kernels.decode.source import call, source
from kernels.tile import tile_kernel


def num_warps(k: int, most: int) -> int:
    """Warps that share k inputs: a power of two, whole blocks of 128 inputs for each."""
    warps = most
    while k % (128 * warps):
        warps //= 2
    return warps


@tile_kernel(
    {"n8": 1536, "n16": 2624, "k": 4096, "s": 1, "rows_per_scale": 128},
    {"n8": 256, "n16": 1056, "k": 128, "s": 4, "rows_per_scale": 128},
    {"n8": 0, "n16": 129280, "k": 4096, "s": 1, "rows_per_scale": 128},
)
def fused_linear(n8: int, n16: int, k: int, s: int, rows_per_scale: int) -> Any:
    """FP8 rows on quantised inputs, rounded to bfloat16, and bfloat16 rows on plain inputs; float32 [s, n8 + n16]."""
    assert n8 % 16 == n16 % 16 == 0, f"{n8} and {n16} rows are not whole blocks of 16"
    warps = num_warps(k, 8)
    blocks8 = max(1, n8 // rows_per_scale)

    @T.prim_func
    def fused_linear(
        w8: T.Tensor((max(n8, 1), k), "uint8"),
        scale: T.Tensor((blocks8, k // 128), "uint8"),
        w16: T.Tensor((max(n16, 1), k), "bfloat16"),
        codes: T.Tensor((s, k), "uint8"),
        scales: T.Tensor((s, k // 128), "float32"),
        x: T.Tensor((s, k), "bfloat16"),
        y: T.Tensor((s, n8 + n16), "float32"),
    ) -> None:
        with T.Kernel((n8 + n16) // 16, threads=32 * warps, prelude=source()):
            call("fused_linear", (n8, n16, k, s, warps, rows_per_scale), w8, scale, w16, codes, scales, x, y)

    return fused_linear


@tile_kernel(
    {"n": 8192, "groups": 8, "k": 4096, "s": 1, "rows_per_scale": 128},
    {"n": 256, "groups": 2, "k": 256, "s": 4, "rows_per_scale": 128},
)
def grouped_linear(n: int, groups: int, k: int, s: int, rows_per_scale: int) -> Any:
    """Groups of FP8 rows, each on its own k inputs, which are not quantised; bfloat16 [s, n]."""
    warps = num_warps(k, 4)

    @T.prim_func
    def grouped_linear(
        w: T.Tensor((n, k), "uint8"),
        scale: T.Tensor((n // rows_per_scale, k // 128), "uint8"),
        x: T.Tensor((s, groups * k), "bfloat16"),
        y: T.Tensor((s, n), "bfloat16"),
    ) -> None:
        with T.Kernel(n // 16, threads=32 * warps, prelude=source()):
            call("grouped_linear", (n, n // groups, k, s, warps, rows_per_scale), w, scale, x, y)

    return grouped_linear


@tile_kernel({"n": 4096, "k": 8192, "s": 1, "rows_per_scale": 128}, {"n": 128, "k": 256, "s": 4, "rows_per_scale": 128})
def quantised_linear(n: int, k: int, s: int, rows_per_scale: int) -> Any:
    """FP8 rows on inputs that are quantised on the way; bfloat16 [s, n]."""
    warps = num_warps(k, 8)

    @T.prim_func
    def quantised_linear(
        w: T.Tensor((n, k), "uint8"),
        scale: T.Tensor((n // rows_per_scale, k // 128), "uint8"),
        x: T.Tensor((s, k), "bfloat16"),
        y: T.Tensor((s, n), "bfloat16"),
    ) -> None:
        with T.Kernel(n // 16, threads=32 * warps, prelude=source()):
            call("quantised_linear", (n, k, s, warps, rows_per_scale), w, scale, x, y)

    return quantised_linear
