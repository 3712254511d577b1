"""A layer's weights in the form that the decode kernels take: views of the model's tensors, but for some padding."""

from __future__ import annotations

from typing import NamedTuple

import torch

from services.worker.model import Model
from services.worker.model.compression import Compressor
from services.worker.model.hyper import HyperConnection
from services.worker.model.layer import Layer
from shared.checkpoint.config import ModelConfig
from shared.config import PrefetchConfig

ROWS = 16
"""Rows of a block of threads; fewer are padded with zeros."""


class Fp8(NamedTuple):
    """codes uint8 [n, k], scale uint8 [n / rows_per_scale, k / 128]."""

    codes: torch.Tensor
    scale: torch.Tensor
    rows_per_scale: int

    def head(self, n: int) -> Fp8:
        return Fp8(self.codes[:n], self.scale[: n // self.rows_per_scale], self.rows_per_scale)


class Pooling(NamedTuple):
    """A compressor's norm [d] and bias of places [ratio, width], float32."""

    norm: torch.Tensor
    ape: torch.Tensor


class LayerWeights(NamedTuple):
    """`inputs` see the attention's input, FP8 rows and bfloat16 rows; `shared_w1_w3` and `gates` the expert half's, in
    the same way. `gates` is the layer's own and, if steps guess, the next one's behind it, each padded to whole ROWS.
    """

    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    inputs8: Fp8
    inputs16: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    pooling: Pooling
    index_pooling: Pooling
    wq_b: Fp8
    wo_a: Fp8
    wo_b: Fp8
    sink: torch.Tensor
    shared_w1_w3: Fp8
    shared_w2: Fp8
    gates: torch.Tensor
    bias: torch.Tensor
    tid2eid: torch.Tensor

    @classmethod
    def of(cls, layer: Layer, config: ModelConfig, ratio: int, gates: torch.Tensor) -> LayerWeights:
        attention, moe = layer.attention, layer.moe
        device = attention.sink.device
        index_compressor = None if attention.indexer is None else attention.indexer.compressor
        none = torch.zeros(1, config.hidden_size, dtype=torch.bfloat16, device=device)
        return cls(
            hc_attn=layer.hc_attn,
            hc_ffn=layer.hc_ffn,
            attn_norm=layer.attn_norm,
            ffn_norm=layer.ffn_norm,
            inputs8=_fp8(attention.wq_a_wkv),
            inputs16=none if attention.unquantised is None else attention.unquantised,
            q_norm=attention.q_norm,
            kv_norm=attention.kv_norm,
            pooling=_pooling(attention.compressor, config.head_dim, ratio, device),
            index_pooling=_pooling(index_compressor, config.index_head_dim, ratio, device),
            wq_b=_fp8(attention.wq_b),
            wo_a=_fp8(attention.wo_a),
            wo_b=_fp8(attention.wo_b),
            sink=attention.sink,
            shared_w1_w3=_fp8(moe.shared_w1_w3),
            shared_w2=_fp8(moe.shared_w2),
            gates=gates,
            bias=torch.zeros(config.n_routed_experts, device=device) if moe.bias is None else moe.bias,
            tid2eid=torch.zeros(1, config.num_experts_per_tok, dtype=torch.int64, device=device)
            if moe.tid2eid is None
            else moe.tid2eid,
        )


class StepWeights(NamedTuple):
    """Of all layers. hashed: the experts of each token id, in the layers where the id alone chooses them and hints are
    sent, int16 [layers, vocab, num_experts_per_tok]; guesses: whether each layer guesses the next one's experts."""

    layers: list[LayerWeights]
    hashed: torch.Tensor
    guesses: bool

    @classmethod
    def of(cls, model: Model, prefetch: PrefetchConfig) -> StepWeights:
        config, guesses = model.config, prefetch.look_ahead
        gates = _joined_gates(model)
        layers = [
            LayerWeights.of(layer, config, config.compress_ratios[i], gates[i : i + 1 + guesses].flatten(0, 1))
            for i, layer in enumerate(model.layers)
        ]
        tables = [layer.moe.tid2eid.short() for layer in model.layers if layer.moe.tid2eid is not None]
        if tables and prefetch.hash_layers:
            return cls(layers, torch.stack(tables), guesses)
        shape = 0, config.vocab_size, config.num_experts_per_tok
        return cls(layers, torch.zeros(shape, dtype=torch.int16, device=model.device), guesses)


def _joined_gates(model: Model) -> torch.Tensor:
    """The gates of all layers behind each other and zeros after the last, [layers + 1, rows, hidden], so that a layer's
    and the next one's are one matrix without a copy; the model goes on with views of them."""
    first = model.layers[0].moe.gate
    gates = first.new_zeros(len(model.layers) + 1, -(-len(first) // ROWS) * ROWS, first.shape[1])
    for rows, layer in zip(gates, model.layers, strict=False):
        rows[: len(first)] = layer.moe.gate
        layer.moe.gate = rows[: len(first)]
    return gates


def _fp8(prepared: object) -> Fp8:
    """From what `kernels.prepare_fp8` gives on a GPU."""
    weight: torch.Tensor = prepared.weight  # type: ignore[attr-defined]
    return Fp8(weight.view(torch.uint8), prepared.scale, prepared.rows_per_scale)  # type: ignore[attr-defined]


def _pooling(compressor: Compressor | None, d: int, ratio: int, device: torch.device) -> Pooling:
    """A layer without compressor gets a place that no kernel looks at."""
    if compressor is None:
        return Pooling(torch.zeros(d, device=device), torch.zeros(ratio or 1, d, device=device))
    return Pooling(compressor.norm, compressor.bias)
