"""Power-of-two scales inside kernels, exact, from the bits of float32; see `kernels.reference.scale`."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kernels.reference.scale import carry


def scale_byte(amax: Any, limit: float) -> Any:
    """The ue8m0 byte, as int32, of 2^ceil(log2(amax / limit)). amax: float32, normal and positive."""
    return (T.reinterpret(amax, "int32") + carry(limit)) >> 23


def from_scale_byte(byte: Any) -> Any:
    """2^(byte - 127) as float32. byte: int32, 1 to 254."""
    return T.reinterpret(byte << 23, "float32")


def inverse_of_scale_byte(byte: Any) -> Any:
    """2^(127 - byte) as float32. byte: int32, 0 to 253."""
    return T.reinterpret((254 - byte) << 23, "float32")
