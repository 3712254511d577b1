"""Checkpoints for tests: made once per session and copied, so that a test may damage its own."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from shared.checkpoint.synth import SynthOptions, synthesise


@functools.cache
def tiny_checkpoint(layers: int = 5, experts: int = 6, seed: int = 0) -> Path:
    """A directory that must not be changed: every kind of layer, about 3 MB. Removed when the process ends."""
    keeper = tempfile.TemporaryDirectory(prefix="icebox-tiny-")
    _KEEPERS.append(keeper)
    out = Path(keeper.name) / "checkpoint"
    synthesise(out, SynthOptions("tiny", layers, experts, seed))
    return out


def copy_of_tiny(directory: Path, layers: int = 5, experts: int = 6) -> Path:
    """A copy in `directory` that may be changed."""
    return Path(shutil.copytree(tiny_checkpoint(layers, experts), directory / "checkpoint"))


_KEEPERS: list[tempfile.TemporaryDirectory[str]] = []
