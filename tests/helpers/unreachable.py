"""Paths that cannot be reached or made, each in its own way."""

from __future__ import annotations

from pathlib import Path

UNREACHABLE = ["too long", "below a file", "links in a circle"]


def unreachable(directory: Path, kind: str) -> Path:
    """One of `UNREACHABLE`, below `directory`."""
    (directory / "file").touch()
    (directory / "circle").symlink_to("circle")
    return {
        "too long": directory / ("a" * 300),
        "below a file": directory / "file" / "below",
        "links in a circle": directory / "circle",
    }[kind]
