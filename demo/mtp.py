"""The multi-token-prediction block: a `transformers` decoder layer behind the two projections of V4's preview.

From the backbone's streams at a position and the token after it, the token after that. Embedding and vocabulary are
the backbone's. Source: the model card and reference code of DeepSeek-V4-Flash (preview).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4


class MtpBlock(nn.Module):
    """`transformers` has no such block; everything but the way in is its own layer and head."""

    def __init__(self, backbone: DeepseekV4Config) -> None:
        super().__init__()
        extra = backbone.num_hidden_layers
        made = copy.deepcopy(backbone)
        made.num_hidden_layers = extra + 1
        made.layer_types = [*backbone.layer_types, "sliding_attention"]
        made.mlp_layer_types = [*backbone.mlp_layer_types, "moe"]
        width = made.hidden_size
        self.e_proj = nn.Linear(width, width, bias=False)
        self.h_proj = nn.Linear(width, width, bias=False)
        self.enorm = v4.DeepseekV4RMSNorm(width, made.rms_norm_eps)
        self.hnorm = v4.DeepseekV4RMSNorm(width, made.rms_norm_eps)
        self.layer = v4.DeepseekV4DecoderLayer(made, extra)
        self.hc_head = v4.DeepseekV4HyperHead(made)
        self.norm = v4.DeepseekV4RMSNorm(width, made.rms_norm_eps)

    def start_from(self, layer: v4.DeepseekV4DecoderLayer, head: v4.DeepseekV4HyperHead, norm: nn.Module) -> None:
        """Begin with a backbone layer's weights (one without compression or hash table), its head and norm.

        The way in starts as the plain sum of both inputs.
        """
        own = self.layer.state_dict()
        given = {k: v for k, v in layer.state_dict().items() if k in own and v.shape == own[k].shape}
        self.layer.load_state_dict(given, strict=False)
        self.hc_head.load_state_dict(head.state_dict())
        self.norm.load_state_dict(norm.state_dict())
        for projection in (self.e_proj, self.h_proj):
            nn.init.eye_(projection.weight)

    def forward(
        self, streams: Tensor, embedded: Tensor, position_embeddings: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Normed hidden [b, s, width] to be read by the backbone's vocabulary.

        streams [b, s, hc, width] before the backbone's head; embedded [b, s, width], the tokens one position further.
        """
        x = self.e_proj(self.enorm(embedded)).unsqueeze(2) + self.h_proj(self.hnorm(streams))
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        x = self.layer(x, position_embeddings=position_embeddings, position_ids=positions, attention_mask=None)
        return self.norm(self.hc_head(x))
