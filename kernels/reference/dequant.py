"""Weights as stored, to float32; exact, since every stored value times a power of two is a float32."""

from __future__ import annotations

import functools

import torch

from kernels.reference.scale import decode_scale

FP8_BLOCK = 128
FP4_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequant_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight: [n, k] float8_e4m3fn, scale: [ceil(n/128), ceil(k/128)] float8_e8m0fnu; returns [n, k] float32."""
    rows = decode_scale(scale).repeat_interleave(FP8_BLOCK, 0)[: len(weight)]
    values = weight.float()
    # In place and block by block: a load must not need the memory of a weight twice.
    for number, block in enumerate(values.split(FP8_BLOCK, 1)):
        block.mul_(rows[:, number : number + 1])
    return values


def dequant_fp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight: [n, k/2] uint8 or int8, two e2m1 codes a byte, k a multiple of 32; scale: [n, k/32] float8_e8m0fnu;
    returns [n, k] float32."""
    values = _decode_fp4(weight).view(weight.shape[0], -1, FP4_BLOCK)
    return values.mul_(decode_scale(scale).unsqueeze(-1)).flatten(1)


def _decode_fp4(codes: torch.Tensor) -> torch.Tensor:
    """The values of packed codes, float32 [2 * codes.numel()]."""
    pairs_of_bytes = codes.reshape(-1).view(torch.uint16).int()
    return torch.index_select(_quads(codes.device), 0, pairs_of_bytes).view(torch.float16).float()


@functools.cache
def _quads(device: torch.device) -> torch.Tensor:
    """int64 [65536]: for every two bytes their four values, as float16 bits, so that one look-up fetches them all."""
    values = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), dtype=torch.float16)
    # Element 2i of a row lies in the low nibble of byte i, 2i + 1 in the high one; bytes are little-endian too.
    nibbles = torch.stack([torch.arange(65536) >> shift & 15 for shift in (0, 4, 8, 12)], -1)
    return values[nibbles].view(torch.int64).flatten().to(device)
