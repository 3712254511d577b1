"""What a sequence leaves behind in each layer: the window of raw keys, compressed entries and half-full groups.

Keys are on the grid that the cache's format allows, in the type that the device computes with, so that decoding
converts nothing. What a stretch of a prompt left behind can be copied out and put back, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shared.checkpoint.config import ModelConfig


class CompressorState:
    """The tokens that wait for their group to close; with overlap, the closed group before it too.

    `rows` [2, n, width] float32: keys, and gates with the position's bias added; n is the ratio, or twice the ratio
    with the previous group in the first half.
    """

    def __init__(self, ratio: int, width: int, device: torch.device) -> None:
        overlap = ratio == 4
        self.ratio = ratio
        self.rows = torch.empty(2, ratio * (2 if overlap else 1), width * (2 if overlap else 1), device=device)
        self.reset()

    def used_rows(self, position: int) -> torch.Tensor:
        """View of the rows that count after `position` tokens; the others will be written before they are read."""
        return self.rows[:, : self.rows.shape[1] - self.ratio + position % self.ratio]

    def reset(self) -> None:
        """A group that does not exist has gate -inf, so it weighs nothing."""
        self.rows[0].zero_()
        self.rows[1].fill_(-torch.inf)


class LayerState:
    """One layer's part. `keys` [window + entries, head_dim]: the ring (row = position mod window), then entries."""

    def __init__(
        self, config: ModelConfig, ratio: int, max_context: int, device: torch.device, key_dtype: torch.dtype
    ) -> None:
        self.window = config.sliding_window
        self._ratio = ratio
        entries = max_context // ratio if ratio else 0

        def no_keys(rows: int, width: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=key_dtype, device=device)

        self.keys = no_keys(self.window + entries, config.head_dim)
        self.compressor = CompressorState(ratio, config.head_dim, device) if ratio else None
        has_indexer = ratio == 4
        self.index_keys = no_keys(entries, config.index_head_dim) if has_indexer else None
        self.index_compressor = CompressorState(ratio, config.index_head_dim, device) if has_indexer else None

    @property
    def entries(self) -> torch.Tensor:
        """Compressed entries, those not yet written included."""
        return self.keys[self.window :]

    def keep_last(self, kv: torch.Tensor, position: int) -> None:
        """Put keys [m, head_dim] of the tokens at `position`.. into the ring, as many of the last as it holds."""
        end = position + len(kv)
        kept = torch.arange(max(position, end - self.window), end, device=kv.device)
        self.keys[kept % self.window] = kv[-len(kept) :]

    def reset(self) -> None:
        """Keys need no clearing: what a position may see follows from the position."""
        for compressor in (self.compressor, self.index_compressor):
            if compressor is not None:
                compressor.reset()

    def appended(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Views of what the tokens from `begin` to `end` added for good: entries of the groups that they closed."""
        if not self._ratio:
            return {}
        closed = slice(begin // self._ratio, end // self._ratio)
        views = {"entries": self.entries[closed]}
        return views if self.index_keys is None else views | {"index_keys": self.index_keys[closed]}

    def passing(self, position: int) -> dict[str, torch.Tensor]:
        """Views of what later tokens overwrite: the ring and the half-full groups, after `position` tokens."""
        groups = {"group": self.compressor, "index_group": self.index_compressor}
        views = {name: group.used_rows(position) for name, group in groups.items() if group is not None}
        return {"ring": self.keys[: min(position, self.window)]} | views

    @property
    def nbytes(self) -> int:
        compressors = [c.rows for c in (self.compressor, self.index_compressor) if c is not None]
        tensors = [self.keys, *compressors] + ([] if self.index_keys is None else [self.index_keys])
        return sum(t.nbytes for t in tensors)


@dataclass(frozen=True, slots=True)
class SegmentState:
    """What a segment of a sequence left behind, copied to the host's memory; tensors by layer and name.

    `appended` is what its tokens added for good, `passing` what a sequence that ends with it needs besides;
    `position` and `extra_position` are those at its end.
    """

    position: int
    extra_position: int
    appended: Mapping[str, torch.Tensor]
    passing: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class SequenceState:
    """All layers of one sequence, extra blocks included; `position` is the number of tokens seen."""

    layers: list[LayerState]
    max_context: int
    position: int = 0
    extra_position: int = 0

    @classmethod
    def of(cls, config: ModelConfig, max_context: int, device: torch.device, key_dtype: torch.dtype) -> SequenceState:
        """An empty sequence on `device`, whose keys are kept in `key_dtype`."""
        layers = [LayerState(config, ratio, max_context, device, key_dtype) for ratio in config.compress_ratios]
        return cls(layers, max_context)

    def reset(self) -> None:
        """Forget the sequence."""
        self.position = self.extra_position = 0
        for layer in self.layers:
            layer.reset()

    def export(self, begin: int) -> SegmentState:
        """A copy of what the tokens since position `begin` left behind."""
        return SegmentState(
            self.position, self.extra_position, _copies(self._appended(begin, self.position)), _copies(self._passing())
        )

    def restore(self, path: Sequence[SegmentState]) -> None:
        """Become the sequence of these segments, the first of which begins at position 0."""
        self.reset()
        for segment in path:
            _fill(self._appended(self.position, segment.position), segment.appended)
            self.position, self.extra_position = segment.position, segment.extra_position
        if path:
            _fill(self._passing(), path[-1].passing)

    def _appended(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        return _by_layer(layer.appended(begin, end) for layer in self.layers)

    def _passing(self) -> dict[str, torch.Tensor]:
        """Extra blocks are never ahead of the backbone, so its position covers them."""
        return _by_layer(layer.passing(self.position) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def _by_layer(layers: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": view for number, views in enumerate(layers) for name, view in views.items()}


def _copies(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: view.to("cpu", copy=True).contiguous() for name, view in views.items()}


def _fill(views: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, view in views.items():
        view.copy_(values[name])
