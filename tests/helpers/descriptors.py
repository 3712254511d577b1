"""Which files this process has open."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """What is opened inside the block is closed inside it."""
    gc.collect()  # what earlier tests dropped must not be closed meanwhile
    before = os.listdir("/proc/self/fd")
    yield
    after = os.listdir("/proc/self/fd")
    assert after == before, f"open before {before}, after {after}"


def num_descriptors_of(path: Path) -> int:
    """How often this process has the file open."""
    return sum(os.path.realpath(link) == str(path.resolve()) for link in Path("/proc/self/fd").iterdir())
