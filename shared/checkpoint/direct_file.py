"""Opens files past the page cache, which is what reads and writes at disk speed take (open(2): O_DIRECT)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

SECTOR_BYTES = 4096
"""O_DIRECT wants offsets, lengths and memory at multiples of the drive's block; these cover every drive."""


class DirectFile(NamedTuple):
    """A descriptor; `is_direct` is not so where the file system refuses."""

    fd: int
    is_direct: bool


def open_direct(path: Path, flags: int, mode: int = 0o644) -> DirectFile:
    """As `os.open`, close-on-exec, with O_DIRECT unless the file system has none (EINVAL). Raises OSError."""
    flags |= os.O_CLOEXEC
    try:
        return DirectFile(os.open(path, flags | os.O_DIRECT, mode), True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return DirectFile(os.open(path, flags, mode), False)
