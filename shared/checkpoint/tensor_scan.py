"""Looks at the values of a tensor as its bytes stream by: what no trained weight can be.

NaN and infinity in floating types, the NaN code in scales, expert ids out of range in hash tables. FP4 pairs are never
wrong. Works on any cut of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shared.checkpoint.safetensors_header import DTYPE_BITS

Bytes = NDArray[np.uint8]

# Values a look at a time, so that temporaries stay in the second-level cache.
_STEP = 1 << 17


def _f8_e4m3(data: Bytes) -> int:
    return int(np.count_nonzero((data & 0x7F) == 0x7F))


def _f8_e8m0(data: Bytes) -> int:
    return int(np.count_nonzero(data == 0xFF))


def _bf16(data: Bytes) -> int:
    return int(np.count_nonzero((data.view(np.uint16) & 0x7F80) == 0x7F80))


def _f16(data: Bytes) -> int:
    return int(np.count_nonzero((data.view(np.uint16) & 0x7C00) == 0x7C00))


def _f32(data: Bytes) -> int:
    return int(np.count_nonzero((data.view(np.uint32) & 0x7F800000) == 0x7F800000))


_COUNTERS: dict[str, tuple[Callable[[Bytes], int], str]] = {
    "F8_E4M3": (_f8_e4m3, "NaN values"),
    "F8_E8M0": (_f8_e8m0, "impossible scales (byte 255)"),
    "BF16": (_bf16, "NaN or infinite values"),
    "F16": (_f16, "NaN or infinite values"),
    "F32": (_f32, "NaN or infinite values"),
}


def scannable(dtype: str) -> bool:
    """Whether values of this type can be impossible."""
    return dtype in _COUNTERS or dtype == "I64"


class TensorScan:
    """Counts the impossible values of one tensor. `limit` is the number of experts for tables of expert ids."""

    def __init__(self, name: str, dtype: str, limit: int | None = None) -> None:
        self._name = name
        self._item = DTYPE_BITS[dtype] // 8
        self._rest = b""
        self._bad = 0
        self._count: Callable[[Bytes], int] | None = None
        self._what = ""
        if dtype in _COUNTERS:
            self._count, self._what = _COUNTERS[dtype]
        elif limit is not None:
            self._count, self._what = _out_of_range(limit), f"expert ids outside 0 to {limit - 1}"

    def feed(self, data: memoryview) -> None:
        """The next bytes of the tensor."""
        if self._count is None:
            return
        if self._rest:
            head = self._rest + bytes(data[: self._item - len(self._rest)])
            data = data[len(head) - len(self._rest) :]
            if len(head) < self._item:
                self._rest = head
                return
            self._look(head)
        whole = len(data) - len(data) % self._item
        self._look(data[:whole])
        self._rest = bytes(data[whole:])

    def problem(self) -> str | None:
        """What was found, once everything has been fed."""
        return f"tensor {self._name} holds {self._bad:,} {self._what}" if self._bad else None

    def _look(self, data: memoryview | bytes) -> None:
        if not data:
            return
        assert self._count is not None
        values = np.frombuffer(data, dtype=np.uint8)
        step = _STEP * self._item
        self._bad += sum(self._count(values[start : start + step]) for start in range(0, len(values), step))


def _out_of_range(limit: int) -> Callable[[Bytes], int]:
    def count(data: Bytes) -> int:
        ids = data.view(np.int64)
        return int(np.count_nonzero((ids < 0) | (ids >= limit)))

    return count
