"""Products of quantised activations with quantised weights, accumulated in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference.dequant import dequant_fp4, dequant_fp8
from kernels.reference.scale import decode_scale

ACT_BLOCK = 128

# float32 values of a weight at once: 1 MiB, half of a common second-level cache.
BLOCK_VALUES = 1 << 18


def fp8_gemm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """a: [m, k] float8_e4m3fn, a_scale: [m, k/128]; w: [n, k] float8_e4m3fn, w_scale: [n/128, k/128]; both scales
    float8_e8m0fnu. Returns a @ w^T, [m, n] bfloat16."""
    return F.linear(_activations(a, a_scale), dequant_fp8(w, w_scale)).to(torch.bfloat16)


def fp4_gemm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """As `fp8_gemm`, with w: [n, k/2], two e2m1 codes a byte, and w_scale: [n, k/32]."""
    return fp4_linear(_activations(a, a_scale), w, w_scale).to(torch.bfloat16)


def fp4_linear(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """x: [m, k] float32, quantised values; w, w_scale as in `fp4_gemm`. Returns x @ w^T, [m, n] float32.

    A few rows of w at a time, so that their float32 values never leave the processor's cache.
    """
    rows = max(1, BLOCK_VALUES // x.shape[-1])
    if w.shape[0] <= rows:
        return F.linear(x, dequant_fp4(w, w_scale))
    blocks = zip(w.split(rows), w_scale.split(rows), strict=True)
    return torch.cat([F.linear(x, dequant_fp4(*block)) for block in blocks], -1)


def _activations(a: torch.Tensor, a_scale: torch.Tensor) -> torch.Tensor:
    return (a.to(torch.float32).unflatten(-1, (-1, ACT_BLOCK)) * decode_scale(a_scale).unsqueeze(-1)).flatten(-2)
