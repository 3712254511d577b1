"""Looks at the values of a tensor as its bytes stream by: what no trained weight can be.

NaN and infinity in floating types, the NaN code in scales, expert ids out of range in hash tables. FP4 pairs are never
wrong. Works on any cut of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.checkpoint.safetensors_header import DTYPE_BITS

Bytes = NDArray[np.uint8]
Count = Callable[[Bytes], int]


def _count_codes(unsigned: type[np.unsignedinteger[Any]], limit: int) -> Count:
    """Counts values whose code, the sign bit aside, is `limit` or above; where there is no sign, the full code."""
    bits = np.iinfo(unsigned).bits
    signed, negative = np.dtype(f"i{bits // 8}"), limit | 1 << (bits - 1)

    def count(data: Bytes) -> int:
        codes = data.view(unsigned)
        # Two maxima need no temporaries, and nearly always there is nothing to count.
        if codes.max() < negative and codes.view(signed).max() < limit:
            return 0
        return int(np.count_nonzero(codes >= negative) + np.count_nonzero(codes.view(signed) >= limit))

    return count


def _count_ids(limit: int) -> Count:
    # Negative ids are the largest unsigned ones.
    return lambda data: int(np.count_nonzero(data.view(np.uint64) >= limit))


_COUNTERS: dict[str, tuple[Count, str]] = {
    "F8_E4M3": (_count_codes(np.uint8, 0x7F), "NaN values"),
    "F8_E8M0": (_count_codes(np.uint8, 0xFF), "impossible scales (byte 255)"),
    "BF16": (_count_codes(np.uint16, 0x7F80), "NaN or infinite values"),
    "F16": (_count_codes(np.uint16, 0x7C00), "NaN or infinite values"),
    "F32": (_count_codes(np.uint32, 0x7F800000), "NaN or infinite values"),
}


def scan_of(name: str, dtype: str, experts: int) -> TensorScan | None:
    """What counts the impossible values of a tensor; None where none is. `experts` is how many a layer has."""
    if dtype in _COUNTERS:
        return TensorScan(name, DTYPE_BITS[dtype] // 8, *_COUNTERS[dtype])
    if name.endswith(".tid2eid") and dtype == "I64":
        return TensorScan(name, 8, _count_ids(experts), f"expert ids outside 0 to {experts - 1}")
    return None


class TensorScan:
    """Counts the impossible items of one tensor: `count` is given whole items of `item_bytes`, `what` names them."""

    def __init__(self, name: str, item_bytes: int, count: Count, what: str) -> None:
        self._name = name
        self._item = item_bytes
        self._count = count
        self._what = what
        self._rest = b""
        self._bad = 0

    def feed(self, data: memoryview) -> None:
        """The next bytes of the tensor."""
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
        self._bad += self._count(np.frombuffer(data, dtype=np.uint8))
