"""Hyper-connections around a sublayer: what it reads from the residual streams, and how they take its output."""

from __future__ import annotations

import torch

import kernels
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig


class HyperConnection:
    """The mixing of one half of a layer."""

    def __init__(self, reader: WeightReader, name: str, config: ModelConfig) -> None:
        self._config = config
        self.fn = reader.float32(f"{name}_fn")
        self.base = reader.float32(f"{name}_base")
        self.scale = reader.float32(f"{name}_scale")

    def read(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """h: [m, n, hidden] -> the sublayer's input [m, hidden], and `post`, `comb` for `write`."""
        c = self._config
        mixes = kernels.hc_mixes(h, self.fn, c.rms_norm_eps)
        pre, post, comb = kernels.hc_split_sinkhorn(
            mixes, self.scale, self.base, c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps
        )
        return kernels.hc_pre(h, pre), post, comb

    def write(self, x: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The streams after the sublayer gave x; h is what `read` saw."""
        return kernels.hc_post(x, h, post, comb)


class Head:
    """From the streams to logits: weighted sum, norm, vocabulary."""

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig, vocabulary: torch.Tensor) -> None:
        self._config = config
        self.fn = reader.float32(f"{prefix}hc_head_fn")
        self.base = reader.float32(f"{prefix}hc_head_base")
        self.scale = reader.float32(f"{prefix}hc_head_scale")
        self.norm = reader.float32(f"{prefix}norm.weight")
        self.vocabulary = vocabulary

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """h: [m, n, hidden] -> float32 [m, vocab]."""
        c = self._config
        mixes = kernels.hc_mixes(h, self.fn, c.rms_norm_eps)
        y = kernels.hc_pre(h, kernels.hc_head_weights(mixes, self.scale, self.base, c.hc_eps))
        y = kernels.rms_norm(y, self.norm, c.rms_norm_eps)
        return kernels.float_linear(y, self.vocabulary)
