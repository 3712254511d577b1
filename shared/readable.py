"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(count: int, one: str) -> str:
    """A number and its noun, such as "1 token" or "1,200 tokens"."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def readable_bytes(count: float) -> str:
    """Bytes in the largest unit that leaves at least 1, such as "12.8 MiB"."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"
