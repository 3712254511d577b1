"""The cache as a picture: for every expert whether it is resident, and how hot it is.

One byte an expert, layer by layer: 128 if it is resident, plus its heat from 0 to 127, which is the square root of its
share of the hottest one's. So each picture says everything, and whoever draws flashes compares it with the one before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.memory.control_block import NO_SLOT

RESIDENT = 128
HOTTEST = 127
# Heat fades with work, not with time, so that an idle cache keeps its picture: it halves whenever there were this many
# uses for each expert.
HALF_LIFE = 16


class Picture:
    """Follows the use counts (uint64 [layers, experts], cumulative) from one picture to the next."""

    def __init__(self, layers: int, experts: int) -> None:
        self._seen = np.zeros((layers, experts), np.uint64)
        self._heat = np.zeros((layers, experts), np.float64)

    def take(self, slot_table: npt.NDArray[np.int32], uses: npt.NDArray[np.uint64]) -> bytes:
        """The picture now: `layers * experts` bytes. Costs the same whatever happened and whoever looks."""
        new = uses - self._seen
        self._seen += new
        self._heat *= 0.5 ** (float(new.sum()) / (HALF_LIFE * new.size))
        self._heat += new
        hottest = max(1.0, self._heat.max())
        cells: npt.NDArray[np.uint8] = np.rint(HOTTEST * np.sqrt(self._heat / hottest)).astype(np.uint8)
        cells[slot_table != NO_SLOT] |= RESIDENT
        return cells.tobytes()
