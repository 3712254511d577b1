"""Parses the header of one safetensors file, and believes nothing in it.

Format: https://github.com/huggingface/safetensors - 8 bytes little-endian header length, a JSON object of
{name: {dtype, shape, data_offsets}}, then the data without gaps. Reads the header only, never the data.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from shared.errors import CheckpointError

# The library refuses longer headers; the largest of the published shards has 0.2 MB.
MAX_HEADER_BYTES = 100_000_000
# The product of this many sizes is still quick to take and fits a float; the model's tensors have one or two.
MAX_DIMENSIONS = 16

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where a tensor's bytes are. `offset` counts from the start of the file; `dtype` is safetensors' own string."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a file, in the order of its data.

    Raises:
        CheckpointError: the file is missing or short, the header is not one, or a tensor's type, shape and place do
            not fit each other, the other tensors and the file. Names file and tensor.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _error(path, f"{size} bytes are too few for a safetensors file; download it again")
            length = int.from_bytes(prefix, "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise _error(path, f"the header claims {length} bytes, the file has {size}; download it again")
            text = file.read(length)
    except OSError as error:
        raise _error(path, f"cannot read ({error.strerror})") from error
    return _tensors(path, _parse(path, text), 8 + length, size)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            double = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise _error(path, f"the header names {double!r} twice")
        return table

    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"the header is not valid JSON: {error}; download it again") from error
    if not isinstance(table, dict):
        raise _error(path, "the header is not a JSON object")
    table.pop("__metadata__", None)
    return table


def _tensors(path: Path, table: dict[str, Any], start: int, size: int) -> dict[str, TensorInfo]:
    infos = sorted(
        ((name, _info(path, name, entry, start)) for name, entry in table.items()),
        key=lambda item: (item[1].offset, item[1].nbytes),
    )
    end = start
    for name, info in infos:
        if info.offset != end:
            what = "overlaps the tensor before it" if info.offset < end else "leaves a gap before it"
            raise _error(path, f"tensor {name} {what} (begins at byte {info.offset}, expected {end})")
        end += info.nbytes
        if end > size:
            raise _error(
                path, f"tensor {name} ends at byte {end}, but the file has {size}: truncated; download it again"
            )
    if end != size:
        raise _error(path, f"{size - end} bytes follow the last tensor; download it again")
    return dict(infos)


def _info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    if not name.isprintable():
        raise _error(path, f"tensor {name!r}: its name cannot be printed")
    if not isinstance(entry, dict):
        raise _error(path, f"tensor {name}: not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _error(path, f"tensor {name}: unknown dtype {dtype!r}")
    if not _is_counts(shape):
        raise _error(path, f"tensor {name}: shape must be a list of sizes, not {shape!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise _error(path, f"tensor {name}: shape has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, f"tensor {name}: data_offsets must be begin and end, not {offsets!r}")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        raise _error(path, f"tensor {name}: {dtype} {shape} needs {bits / 8:g} bytes, data_offsets hold {end - begin}")
    return TensorInfo(path, dtype, tuple(shape), start + begin, end - begin)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _error(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}")
