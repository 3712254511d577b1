"""Products of quantised activations with quantised weights, accumulated in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.reference.dequant import FP4_BLOCK, dequant_fp4, dequant_fp8
from kernels.reference.scale import decode_scale

ACT_BLOCK = 128

# Values of weights decoded at once: 256 KiB of float32, and twice that on the way, stay in a second-level cache.
BLOCK_VALUES = 1 << 16


def fp8_gemm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """a: [m, k] float8_e4m3fn, a_scale: [m, k/128]; w: [n, k] float8_e4m3fn, w_scale: [n/128, k/128]; both scales
    float8_e8m0fnu. Returns a @ w^T, [m, n] bfloat16."""
    return F.linear(_activations(a, a_scale), dequant_fp8(w, w_scale)).bfloat16()


def fp4_gemm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """As `fp8_gemm`, with w: [n, k/2], two e2m1 codes a byte, and w_scale: [n, k/32]."""
    return fp4_linear(_activations(a, a_scale), w, w_scale).bfloat16()


def fp4_linear(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """x: [m, k] float32, quantised values; w, w_scale as in `fp4_gemm`. Returns x @ w^T, [m, n] float32."""
    return fp4_linears([(x, w, w_scale)])[0]


def fp4_linears(products: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """`fp4_linear` of each (x, w, w_scale), all w of one size; w and w_scale may also be flat, and w_scale uint8.

    A product's bits do not depend on its company.

    As many weights are decoded at a time, or as few rows of one, as their float32 values fit the processor's cache.
    """
    if not products:
        return []
    values, k = 2 * products[0][1].numel(), products[0][0].shape[-1]
    together = BLOCK_VALUES // values
    if not together:
        return [_by_rows(*product) for product in products]
    outputs: list[torch.Tensor] = []
    for begin in range(0, len(products), together):
        xs, ws, w_scales = zip(*products[begin : begin + together], strict=True)
        outputs += map(F.linear, xs, _decoded(torch.cat(ws), torch.cat(w_scales), k).split(values // k))
    return outputs


def _by_rows(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    k = x.shape[-1]
    rows = max(1, BLOCK_VALUES // k)
    blocks = zip(w.view(-1).split(rows * k // 2), w_scale.view(-1).split(rows * k // FP4_BLOCK), strict=True)
    return torch.cat([F.linear(x, _decoded(*block, k)) for block in blocks], -1)


def _decoded(w: torch.Tensor, w_scale: torch.Tensor, k: int) -> torch.Tensor:
    """Whole rows, in whatever shape, as float32 [n, k]."""
    return dequant_fp4(w.view(-1, k // 2), w_scale.view(torch.float8_e8m0fnu).view(-1, k // FP4_BLOCK))


def _activations(a: torch.Tensor, a_scale: torch.Tensor) -> torch.Tensor:
    return (a.float().unflatten(-1, (-1, ACT_BLOCK)) * decode_scale(a_scale).unsqueeze(-1)).flatten(-2)
