"""Device functions that decode weights on their way into tiles; a kernel that calls them has `PRELUDE` before it."""

from __future__ import annotations

from pathlib import Path

PRELUDE = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
