"""Builds safetensors files byte by byte, well formed or hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header text; `length` lies about it."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def file_of(table: dict[str, Any], data: bytes = b"") -> bytes:
    return raw(json.dumps(table).encode(), data)


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def rewrite_header(path: Path, change: Any) -> None:
    """Apply `change` to the parsed header of a file on disk, keeping its data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    change(table)
    path.write_bytes(file_of(table, content[8 + length :]))
