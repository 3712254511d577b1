"""The states of sequences as a decode step's kernels see them: those of all sequences, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.decode.attention import compressor_rows, compressor_width
from services.worker.model import LayerState, SequenceState
from shared.checkpoint.config import ModelConfig


class LayerTensors(NamedTuple):
    """A layer's state of all sequences, the sequence first."""

    keys: torch.Tensor
    compressor: torch.Tensor
    index_keys: torch.Tensor
    index_compressor: torch.Tensor


def join(states: Sequence[SequenceState], config: ModelConfig) -> list[LayerTensors]:
    """Lay the states of several sequences behind each other; each goes on as a view of its part."""
    return [_join([state.layers[i] for state in states], config, i) for i in range(config.num_hidden_layers)]


def _join(layers: Sequence[LayerState], config: ModelConfig, number: int) -> LayerTensors:
    ratio = config.compress_ratios[number]
    keys = _stack([layer.keys for layer in layers])
    for i, layer in enumerate(layers):
        layer.keys = keys[i]
    if layers[0].compressor is None:
        return _without_compressor(keys, config)
    rows = _stack([layer.compressor.rows for layer in layers if layer.compressor])
    for i, layer in enumerate(layers):
        assert layer.compressor is not None
        layer.compressor.rows = rows[i]
    if ratio != 4:
        others = _without_compressor(keys, config, ratio)
        return LayerTensors(keys, rows, others.index_keys, others.index_compressor)
    index_keys = _stack([layer.index_keys for layer in layers if layer.index_keys is not None])
    index_rows = _stack([layer.index_compressor.rows for layer in layers if layer.index_compressor])
    for i, layer in enumerate(layers):
        assert layer.index_compressor is not None
        layer.index_keys, layer.index_compressor.rows = index_keys[i], index_rows[i]
    return LayerTensors(keys, rows, index_keys, index_rows)


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One sequence keeps its memory."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(tuple(parts))


def _without_compressor(keys: torch.Tensor, config: ModelConfig, ratio: int = 1) -> LayerTensors:
    """Places for what the kernels of such a layer do not touch."""
    s, device = len(keys), keys.device

    def rows(d: int) -> torch.Tensor:
        return torch.zeros(s, 2, compressor_rows(ratio), compressor_width(ratio, d), device=device)

    index_keys = torch.zeros(s, 1, config.index_head_dim, dtype=torch.bfloat16, device=device)
    return LayerTensors(keys, rows(config.head_dim), index_keys, rows(config.index_head_dim))
