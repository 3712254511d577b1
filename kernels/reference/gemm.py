"""Products of quantised activations with quantised weights, accumulated in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference.dequant import dequant_fp4, dequant_fp8
from kernels.reference.scale import decode_scale

ACT_BLOCK = 128


def fp8_gemm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """a: [m, k] float8_e4m3fn, a_scale: [m, k/128]; w: [n, k] float8_e4m3fn, w_scale: [n/128, k/128]; both scales
    float8_e8m0fnu. Returns a @ w^T, [m, n] bfloat16."""
    return F.linear(_activations(a, a_scale), dequant_fp8(w, w_scale)).to(torch.bfloat16)


def fp4_gemm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """As `fp8_gemm`, with w: [n, k/2], two e2m1 codes a byte, and w_scale: [n, k/32]."""
    return F.linear(_activations(a, a_scale), dequant_fp4(w, w_scale)).to(torch.bfloat16)


def _activations(a: torch.Tensor, a_scale: torch.Tensor) -> torch.Tensor:
    return (a.to(torch.float32).unflatten(-1, (-1, ACT_BLOCK)) * decode_scale(a_scale).unsqueeze(-1)).flatten(-2)
