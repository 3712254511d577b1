"""What one process tells another about a slab: a kind and a few fields, opaque to everyone else."""

from __future__ import annotations

from typing import Any

import msgpack

from shared.errors import ProtocolError


def pack_handle(kind: str, *fields: int | bytes | str) -> bytes:
    handle: bytes = msgpack.packb([kind, *fields])
    return handle


def unpack_handle(handle: bytes) -> tuple[str, list[Any]]:
    """Kind and fields. Raises ProtocolError if it is no handle; the fields are the reader's to check."""
    try:
        kind, *fields = msgpack.unpackb(handle)
    except Exception as error:  # msgpack raises a dozen types for a dozen kinds of garbage
        raise ProtocolError(f"not a slab handle: {error}") from error
    return str(kind), fields


def foreign_handle(kind: str, fields: list[Any]) -> ProtocolError:
    """The error for a kind that nobody knows, or fields that the kind does not have."""
    return ProtocolError(f"slab handle of kind {kind!r} with fields {fields!r}")
