"""Compressed attention: entries that stand for groups of tokens, for the attention itself and for its indexer."""

from __future__ import annotations

import torch

import kernels
from services.worker.model.precision import Precision
from services.worker.model.state import CompressorState
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig


class Compressor:
    """Closes groups as they fill. The projections of its input are the caller's, who fuses them with others."""

    def __init__(
        self, reader: WeightReader, prefix: str, config: ModelConfig, ratio: int, rotations: torch.Tensor
    ) -> None:
        self.ratio = ratio
        self._eps = config.rms_norm_eps
        self._rotations = rotations
        self.bias = reader.float32(f"{prefix}ape")
        self.norm = reader.float32(f"{prefix}norm.weight")
        self.weight = torch.cat([reader.matrix(f"{prefix}{name}.weight") for name in ("wkv", "wgate")])

    def step(
        self, projected: torch.Tensor, state: CompressorState, position: int, precision: Precision
    ) -> torch.Tensor | None:
        """Take in tokens `position`.. and return the entries [n, d] that they close, rotated, or None.

        projected: [m, 2 * width] float32, keys then gates.
        """
        rows = projected.view(len(projected), 2, -1).transpose(0, 1).contiguous()
        rows[1] += self._biases(position, rows.shape[1])
        previous = state.rows.shape[1] - self.ratio  # rows of the group before, with overlap
        filled = previous + position % self.ratio
        num_closed = (filled - previous + rows.shape[1]) // self.ratio
        if num_closed == 0:
            state.rows[:, filled : filled + rows.shape[1]] = rows
            return None
        rows = torch.cat((state.rows[:, :filled], rows), 1)
        used = num_closed * self.ratio
        kv, gate = rows[:, : previous + used].reshape(2, -1, self.ratio, rows.shape[-1])
        rest = rows[:, used:]
        state.rows[:, : rest.shape[1]] = rest
        pooled = kernels.compress_overlapping(kv, gate) if previous else kernels.compress(kv, gate)
        return self._entries(pooled.type(precision.dtype), position // self.ratio)

    def _biases(self, position: int, m: int) -> torch.Tensor:
        """The bias of each token's place in its group, [m, width]."""
        place = position % self.ratio
        if place + m <= self.ratio:
            return self.bias[place : place + m]
        return self.bias[(position + torch.arange(m, device=self.bias.device)) % self.ratio]

    def _entries(self, pooled: torch.Tensor, first: int) -> torch.Tensor:
        """An entry's position is that of its group's first token."""
        end = (first + pooled.shape[0]) * self.ratio
        rotation = self._rotations[first * self.ratio : end : self.ratio]
        return kernels.rope(kernels.rms_norm(pooled, self.norm, self._eps), rotation)


class Indexer:
    """Chooses which entries a query attends to, once there are more than `index_topk`."""

    def __init__(
        self, reader: WeightReader, prefix: str, wq_b: torch.Tensor, config: ModelConfig, rotations: torch.Tensor
    ) -> None:
        self._heads = config.index_n_heads
        self._scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self._rotations = rotations
        self._wq_b = wq_b
        self.topk = config.index_topk
        self.weights_proj = reader.matrix(f"{prefix}weights_proj.weight")
        self.compressor = Compressor(reader, f"{prefix}compressor.", config, 4, rotations)

    def choose(
        self,
        low_rank_q: torch.Tensor,
        head_weights: torch.Tensor,
        keys: torch.Tensor,
        visible: torch.Tensor,
        position: int,
        precision: Precision,
    ) -> torch.Tensor:
        """bool [m, t]: the entries that each query keeps.

        low_rank_q: [m, q_lora_rank] as a linear sees it; head_weights: [m, heads] projected from the layer's
        input; keys: [t, d]; visible: bool [m, t].
        """
        m = low_rank_q.shape[0]
        q = precision.linear(low_rank_q, self._wq_b).view(m, self._heads, -1)
        q = precision.index_value(kernels.rope(q, self._rotations[position : position + m]))
        weights = head_weights.type(precision.dtype) * self._scale
        return kernels.index_topk(kernels.index_scores(q, keys, weights), visible, self.topk)
