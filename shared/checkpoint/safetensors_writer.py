"""Writes safetensors files as a stream: the header first, then each tensor's bytes in the header's order.

Owns the byte layout (https://github.com/huggingface/safetensors: 8 bytes little-endian header length, JSON, data
without gaps) and the library's order of tensors. Does not know what the tensors mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.checkpoint.safetensors_header import DTYPE_BITS

# The library's own order of types; files that it writes hold the tensors sorted by it, then by name.
_ORDER = (
    "U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16",
    "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL",
)  # fmt: skip


class TensorSpec(NamedTuple):
    """Name, safetensors type name and shape of a tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BITS[self.dtype] * math.prod(self.shape) // 8


def library_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order in which `safetensors.save_file` lays tensors out, so the one that downloaded files have."""
    return sorted(specs, key=lambda spec: (_ORDER.index(spec.dtype), spec.name))


def encode_header(specs: Sequence[TensorSpec], metadata: dict[str, str] | None = None, align: int = 8) -> bytes:
    """Length and JSON of a file that holds exactly these tensors one after the other.

    The JSON is padded with spaces so that the data begins at a multiple of `align` bytes (8 at least).
    """
    table: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text
