"""One layer: an attention half and an expert half, each between hyper-connections and behind a norm."""

from __future__ import annotations

import torch

import kernels
from services.worker.experts import ExpertProvider
from services.worker.model.attention import Attention
from services.worker.model.hyper import HyperConnection
from services.worker.model.moe import MoE
from services.worker.model.precision import Precision
from services.worker.model.state import LayerState
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig


class Layer:
    """A layer of the backbone, or the same inside an extra block."""

    def __init__(
        self, reader: WeightReader, config: ModelConfig, number: int, rotations: torch.Tensor, precision: Precision
    ) -> None:
        prefix = config.layer_prefix(number)
        ratio = config.compress_ratios[number]
        self._eps = config.rms_norm_eps
        self.attn_norm = reader.float32(f"{prefix}attn_norm.weight")
        self.ffn_norm = reader.float32(f"{prefix}ffn_norm.weight")
        self.hc_attn = HyperConnection(reader, f"{prefix}hc_attn", config)
        self.hc_ffn = HyperConnection(reader, f"{prefix}hc_ffn", config)
        self.attention = Attention(reader, f"{prefix}attn.", config, ratio, rotations, precision)
        self.moe = MoE(reader, f"{prefix}ffn.", config, number, precision)

    def forward(
        self, h: torch.Tensor, token_ids: torch.Tensor, state: LayerState, position: int, experts: ExpertProvider
    ) -> torch.Tensor:
        """h: [m, streams, hidden], the tokens at `position`..; the same shape after the layer."""
        return self.expert_half(self.attention_half(h, state, position), token_ids, experts)

    def attention_half(self, h: torch.Tensor, state: LayerState, position: int) -> torch.Tensor:
        x, post, comb = self.hc_attn.read(h)
        x = kernels.rms_norm(x, self.attn_norm, self._eps)
        return self.hc_attn.write(self.attention.forward(x, state, position), h, post, comb)

    def expert_half(self, h: torch.Tensor, token_ids: torch.Tensor, experts: ExpertProvider) -> torch.Tensor:
        x, post, comb = self.hc_ffn.read(h)
        x = kernels.rms_norm(x, self.ffn_norm, self._eps)
        return self.hc_ffn.write(self.moe.forward(x, token_ids, experts), h, post, comb)

    def route(self, h: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the router decides for streams that come out of the attention half: topk_ids, topk_weights."""
        x, _, _ = self.hc_ffn.read(h)
        return self.moe.route(kernels.rms_norm(x, self.ffn_norm, self._eps), token_ids)
