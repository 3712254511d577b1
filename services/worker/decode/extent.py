"""How much of the context a decode step looks at: what a graph fixes, so that longer ones need another graph."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.decode.attention import CHUNK
from shared.checkpoint.config import ModelConfig

# Positions that the extents reach: the first needs no choice of entries on the published model.
FIRST_EXTENT = 2048
GROWTH = 4


@dataclass(frozen=True, slots=True)
class Extent:
    """A step for positions below `positions`: how much of the key list and of the index entries it looks at."""

    positions: int

    def num_entries(self, ratio: int) -> int:
        return self.positions // ratio if ratio else 0

    def chooses(self, config: ModelConfig) -> bool:
        """Whether a sequence may have more entries than the indexer keeps."""
        return self.num_entries(4) > config.index_topk

    def num_chunks(self, ratio: int, config: ModelConfig) -> int:
        entries = self.num_entries(ratio)
        seen = min(entries, config.index_topk) if ratio == 4 else entries
        return -(-(config.sliding_window + seen) // CHUNK)


def extents(max_context: int) -> list[Extent]:
    """Each longer than the one before, the last for all positions."""
    positions = [min(FIRST_EXTENT, max_context)]
    while positions[-1] < max_context:
        positions.append(min(positions[-1] * GROWTH, max_context))
    return [Extent(p) for p in positions]
