"""How values are rounded between operations: as the quantised model does it, or not at all.

The exact mode computes in float32 without simulating the quantisation of activations, keys and index entries. It is for
comparing the structure of the model with another implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kernels


@dataclass(frozen=True, slots=True)
class Precision:
    """`dtype` is the type of values between operations."""

    dtype: torch.dtype
    is_quantised: bool

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """What a quantised linear sees of its input, in the type in which the device's linears want it."""
        return kernels.act_round(x) if self.is_quantised else x.float()

    def key_dtype(self, device: torch.device) -> torch.dtype:
        """What cached keys are kept in. Those of the quantised model are exact in bfloat16 too, but for a CPU float32
        saves a conversion at every use."""
        return self.dtype if device.type == "cuda" else torch.float32

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Product of `activations` with a prepared FP8 weight, rounded to the type of values between operations."""
        return kernels.fp8_linear(x, weight, self.dtype)

    def cached_key(self, kv: torch.Tensor, rope_dim: int) -> torch.Tensor:
        """A key as the cache keeps it: FP8 in all but its rotated part. kv: [..., head_dim]."""
        if not self.is_quantised:
            return kv
        plain = kv.shape[-1] - rope_dim
        return torch.cat((kernels.fp8_simulate(kv[..., :plain]), kv[..., plain:]), -1)

    def index_value(self, x: torch.Tensor) -> torch.Tensor:
        """The indexer's queries and keys: rotated by a Hadamard matrix, then FP4. [..., index_head_dim]."""
        return kernels.hadamard_fp4(x) if self.is_quantised else x


QUANTISED = Precision(torch.bfloat16, is_quantised=True)
EXACT = Precision(torch.float32, is_quantised=False)
