"""The value scan counts what no weight can be, value by value, however the bytes are cut."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.checkpoint.tensor_scan import scan_of

EXPERTS = 6
# The decoding by definition: of one little-endian value, whether it is impossible.
IMPOSSIBLE: dict[str, tuple[int, Callable[[bytes], bool]]] = {
    "F8_E4M3": (1, lambda value: value[0] in (0x7F, 0xFF)),
    "F8_E8M0": (1, lambda value: value[0] == 0xFF),
    "BF16": (2, lambda value: not math.isfinite(struct.unpack("<f", b"\0\0" + value)[0])),
    "F16": (2, lambda value: not math.isfinite(struct.unpack("<e", value)[0])),
    "F32": (4, lambda value: not math.isfinite(struct.unpack("<f", value)[0])),
    "I64": (8, lambda value: not 0 <= struct.unpack("<q", value)[0] < EXPERTS),
}
# Bytes near the limits of all the types.
EDGES = st.sampled_from([0x00, 0x01, 0x05, 0x06, 0x7B, 0x7C, 0x7E, 0x7F, 0x80, 0xFB, 0xFC, 0xFE, 0xFF])


def said(dtype: str, pieces: list[bytes]) -> str | None:
    scan = scan_of("t.tid2eid", dtype, EXPERTS)
    assert scan is not None
    for piece in pieces:
        scan.feed(memoryview(piece))
    return scan.problem()


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    return [data[begin:end] for begin, end in pairwise(edges)]


def counts(problem: str | None, count: int) -> bool:
    return problem is None if count == 0 else problem is not None and f" holds {count} " in problem


@pytest.mark.parametrize("dtype", IMPOSSIBLE)
@given(
    data=st.lists(EDGES | st.integers(0, 255), max_size=96).map(bytes),
    cuts=st.lists(st.integers(0, 96), max_size=6),
)
def test_counts(dtype: str, data: bytes, cuts: list[int]) -> None:
    nbytes, impossible = IMPOSSIBLE[dtype]
    data = data[: len(data) - len(data) % nbytes]
    expected = sum(impossible(data[i : i + nbytes]) for i in range(0, len(data), nbytes))
    assert counts(said(dtype, pieces_of(data, cuts)), expected)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E8M0"])
def test_every_byte(dtype: str) -> None:
    found = {code for code in range(256) if said(dtype, [bytes([code])]) is not None}
    assert found == {code for code in range(256) if IMPOSSIBLE[dtype][1](bytes([code]))}


@pytest.mark.parametrize(("name", "dtype"), [("t", "I64"), ("t.tid2eid", "I8")])
def test_every_value_is_possible(name: str, dtype: str) -> None:
    assert scan_of(name, dtype, EXPERTS) is None
