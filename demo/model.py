"""The demo model: its shape, and `transformers`' own implementation of it made ready for training.

What is changed for training: activations pass through the quantisation that the quantised linears will see, window
attention is computed in blocks, and gates count their experts. The maths stays that of `transformers`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from demo import quantise

VOCAB_SIZE = 2688
WINDOW = 128


def published() -> dict[str, Any]:
    """`config.json` of the demo checkpoint, in the published names."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": 7,
        "num_hash_layers": 3,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0],
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 24,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    }


def config(**changes: Any) -> DeepseekV4Config:
    """The same for `transformers`, which must not see the quantisation; `changes` are published keys."""
    table = published() | changes
    for key in ("quantization_config", "expert_dtype", "architectures", "torch_dtype", "model_type", "topk_method"):
        table.pop(key)
    made = DeepseekV4Config(**table)
    made._experts_implementation = "eager"
    return made


def build(seed: int, made: DeepseekV4Config | None = None) -> DeepseekV4ForCausalLM:
    """A fresh model in float32, with random hash tables: each token id has distinct experts."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(made or config())
    for layer in model.model.layers:
        if layer.mlp.is_hash:
            scores = torch.rand(model.config.vocab_size, model.config.n_routed_experts)
            layer.mlp.gate.tid2eid.copy_(scores.topk(model.config.num_experts_per_tok).indices.sort().values)
    return model


# --- training variants of modules: same parameters, other class -------------------------------------------------


class QuantisedLinear(nn.Linear):
    """A linear whose input is rounded to e4m3 in blocks of 128."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(quantise.activation(x), self.weight)


class QuantisedExperts(v4.DeepseekV4Experts):
    """Experts whose inputs, outer and inner, are rounded likewise."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(quantise.activation(hidden_states), top_k_index, top_k_weights)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return quantise.activation(super()._apply_gate(gate_up))


class CountingRouter(v4.DeepseekV4TopKRouter):
    """A gate that adds up in `load` float32 [experts] how often it chose each expert."""

    load: Tensor

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, indices = super().forward(hidden_states)
        chosen = indices.flatten()
        self.load.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float32))
        return logits, weights, indices


class SkippedIndexer(v4.DeepseekV4Indexer):
    """Chooses nothing: blockwise attention sees every entry anyway."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batch, length, _ = hidden_states.shape
        return torch.full((batch, length, 1), -1, dtype=torch.long, device=hidden_states.device)


class RecordingScorer(v4.DeepseekV4IndexerScorer):
    """Keeps the last scores [batch, tokens, entries]."""

    last: Tensor

    def forward(self, *args: Tensor) -> Tensor:
        self.last = super().forward(*args)
        return self.last


def prepare(root: nn.Module) -> None:
    """Turn the modules under `root` into their training variants."""
    for module in root.modules():
        if isinstance(module, v4.DeepseekV4Attention):
            for linear in (module.q_a_proj, module.q_b_proj, module.kv_proj, module.o_b_proj):
                linear.__class__ = QuantisedLinear
        elif isinstance(module, v4.DeepseekV4MLP):
            for linear in (module.gate_proj, module.up_proj, module.down_proj):
                linear.__class__ = QuantisedLinear
        elif isinstance(module, v4.DeepseekV4Experts):
            module.__class__ = QuantisedExperts
        elif isinstance(module, v4.DeepseekV4TopKRouter):
            module.__class__ = CountingRouter
            module.register_buffer("load", torch.zeros(module.num_experts), persistent=False)
        elif isinstance(module, v4.DeepseekV4Indexer):
            module.__class__ = SkippedIndexer


def use_indexers(root: nn.Module) -> list[v4.DeepseekV4Attention]:
    """Give the indexers back and let their scores be recorded; the attention layers that have one."""
    found = []
    for module in root.modules():
        if isinstance(module, v4.DeepseekV4Attention) and isinstance(module.compressor, v4.DeepseekV4CSACompressor):
            module.compressor.indexer.__class__ = v4.DeepseekV4Indexer
            module.compressor.indexer.scorer.__class__ = RecordingScorer
            module.compressor.indexer.index_topk = 1 << 20
            found.append(module)
    return found


# --- attention of whole rows -----------------------------------------------------------------------------------


def blockwise_attention(
    module: v4.DeepseekV4Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Window, compressed entries and sink for whole rows from position 0; the length a multiple of the window.

    query [b, h, s, d]; key [b, 1, s + entries, d], also the values. Every block of queries is compared with its own
    and the previous block of keys only, so that nothing of size s * s is made.
    """
    length, width = query.shape[2], query.shape[3]
    keys = torch.cat((quantise.activation(key[..., : width - 64], 64), key[..., width - 64 :]), -1)[:, 0]
    raw, entries = keys[:, :length], keys[:, length:]
    blocks = raw.unflatten(1, (-1, WINDOW))
    pairs = torch.cat((F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1], blocks), 2)  # [b, n, 2w, d]
    queries = query.unflatten(2, (-1, WINDOW))  # [b, h, n, w, d]
    near = (queries * scaling) @ pairs.transpose(-1, -2).unsqueeze(1)
    near = near.masked_fill(~_near_mask(blocks.shape[1], query.device), float("-inf")).flatten(2, 3)
    scores = [near]
    if entries.shape[1]:
        far = (query * scaling) @ entries.transpose(-1, -2).unsqueeze(1)
        scores.append(far.masked_fill(~_far_mask(length, entries.shape[1], query.device), float("-inf")))
    sink = module.sinks.to(query.dtype).view(1, -1, 1, 1).expand(query.shape[0], -1, length, 1)
    weights = torch.cat((*scores, sink), -1).softmax(-1)
    if getattr(module, "records", False):
        module.seen = weights[..., 2 * WINDOW : -1].float().sum(1).detach()
    out = (weights[..., : 2 * WINDOW].unflatten(2, (-1, WINDOW)) @ pairs.unsqueeze(1)).flatten(2, 3)
    if entries.shape[1]:
        out = out + weights[..., 2 * WINDOW : -1] @ entries.unsqueeze(1)
    return out.transpose(1, 2).contiguous(), None


def _near_mask(num_blocks: int, device: torch.device) -> Tensor:
    """[n, w, 2w]: key j of a pair of blocks is visible to query i if 0 <= i + w - j < w and it exists."""
    i = torch.arange(WINDOW, device=device)[:, None] + WINDOW
    j = torch.arange(2 * WINDOW, device=device)[None, :]
    seen = (i >= j) & (i - j < WINDOW)
    first = torch.arange(num_blocks, device=device)[:, None, None] > 0
    return seen & (first | (j >= WINDOW))


def _far_mask(length: int, entries: int, device: torch.device) -> Tensor:
    """[s, entries]: an entry is visible once all its tokens have been."""
    ends = (torch.arange(entries, device=device) + 1) * (length // entries)
    return ends[None, :] <= torch.arange(length, device=device)[:, None] + 1


ALL_ATTENTION_FUNCTIONS.register("blockwise", blockwise_attention)
