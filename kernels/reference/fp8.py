"""Activation quantisation to e4m3 with one power-of-two scale a block (DeepSeek-V4 reference, `act_quant`)."""

from __future__ import annotations

import math

import torch

from kernels.reference.constants import constant
from kernels.reference.scale import ceil_power_of_two

E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4


def act_quant(x: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of the last dimension.

    x: [..., k] bfloat16 or float32, k a multiple of `block`. Returns q [..., k] float8_e4m3fn and scale
    [..., k / block] float8_e8m0fnu with x = q * scale; scale = 2^ceil(log2(max(amax, 1e-4) / 448)).
    """
    blocks, scale = _scaled(x, block)
    return blocks.flatten(-2).type(torch.float8_e4m3fn), scale.squeeze(-1).type(torch.float8_e8m0fnu)


def act_round(x: torch.Tensor, block: int = 128) -> torch.Tensor:
    """What `act_quant` keeps of x: q * scale as float32 [..., k]."""
    blocks, scale = _scaled(x, block)
    return blocks.type(torch.float8_e4m3fn).float().mul_(scale).view(x.shape)


def fp8_simulate(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """Quantise and dequantise, in the type of x: what the model does to cached keys (all but their rope part)."""
    return act_round(x, block).type(x.dtype)


def _scaled(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x / scale in blocks [..., k / block, block], and the scales [..., k / block, 1].

    The quotient passes e4m3's maximum by a rounding error at most, which the conversion rounds back: no clamp.
    """
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // block, block)
    amax = torch.linalg.vector_norm(blocks, math.inf, -1, keepdim=True)
    scale = ceil_power_of_two(amax.clamp_min_(constant(SMALLEST_AMAX, x.device)), E4M3_MAX)
    return blocks / scale, scale
