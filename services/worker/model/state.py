"""What a sequence leaves behind in each layer: the window of raw keys, compressed entries and half-full groups.

Keys are kept in float32, on the grid that the cache's format allows, so that decoding converts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.checkpoint.config import ModelConfig


class CompressorState:
    """The tokens that wait for their group to close; with overlap, the closed group before it too.

    `rows` [2, n, width] float32: keys, and gates with the position's bias added; n is the ratio, or twice the ratio
    with the previous group in the first half.
    """

    def __init__(self, ratio: int, width: int) -> None:
        overlap = ratio == 4
        self.rows = torch.empty(2, ratio * (2 if overlap else 1), width * (2 if overlap else 1))
        self.reset()

    def reset(self) -> None:
        """A group that does not exist has gate -inf, so it weighs nothing."""
        self.rows[0].zero_()
        self.rows[1].fill_(-torch.inf)


class LayerState:
    """One layer's part. `keys` [window + entries, head_dim]: the ring (row = position mod window), then entries."""

    def __init__(self, config: ModelConfig, ratio: int, max_context: int) -> None:
        self.window = config.sliding_window
        entries = max_context // ratio if ratio else 0
        self.keys = torch.zeros(self.window + entries, config.head_dim)
        self.compressor = CompressorState(ratio, config.head_dim) if ratio else None
        has_indexer = ratio == 4
        self.index_keys = torch.zeros(entries, config.index_head_dim) if has_indexer else None
        self.index_compressor = CompressorState(ratio, config.index_head_dim) if has_indexer else None

    @property
    def entries(self) -> torch.Tensor:
        """Compressed entries, those not yet written included."""
        return self.keys[self.window :]

    def reset(self) -> None:
        """Keys need no clearing: what a position may see follows from the position."""
        for compressor in (self.compressor, self.index_compressor):
            if compressor is not None:
                compressor.reset()

    @property
    def nbytes(self) -> int:
        compressors = [c.rows for c in (self.compressor, self.index_compressor) if c is not None]
        tensors = [self.keys, *compressors] + ([] if self.index_keys is None else [self.index_keys])
        return sum(t.nbytes for t in tensors)


@dataclass(slots=True)
class SequenceState:
    """All layers of one sequence, extra blocks included; `position` is the number of tokens seen."""

    layers: list[LayerState]
    max_context: int
    position: int = 0
    extra_position: int = 0

    @classmethod
    def of(cls, config: ModelConfig, max_context: int) -> SequenceState:
        return cls([LayerState(config, ratio, max_context) for ratio in config.compress_ratios], max_context)

    def reset(self) -> None:
        """Forget the sequence."""
        self.position = self.extra_position = 0
        for layer in self.layers:
            layer.reset()

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)
