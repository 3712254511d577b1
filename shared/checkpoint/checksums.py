"""Checksums over stretches of files: what they are, where a downloaded directory keeps them, how they are compared.

Knows the places that download tools leave digests in; does not read the files themselves.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from pathlib import Path
from typing import NamedTuple

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Checksum(NamedTuple):
    """`digest` (hex) of `nbytes` at `offset` of a file; `what` names the stretch. Algorithms: sha256, crc32."""

    what: str
    offset: int
    nbytes: int
    algorithm: str
    digest: str


class RunningChecksum:
    """Compares a stretch with its checksum while its bytes stream by."""

    def __init__(self, checksum: Checksum) -> None:
        self._checksum = checksum
        self._sha256 = hashlib.sha256() if checksum.algorithm == "sha256" else None
        self._crc32 = 0

    def feed(self, data: memoryview) -> None:
        """The next bytes of the stretch."""
        if self._sha256 is not None:
            self._sha256.update(data)
        else:
            self._crc32 = zlib.crc32(data, self._crc32)

    def problem(self) -> str | None:
        """What is wrong, once everything has been fed."""
        digest = self._sha256.hexdigest() if self._sha256 is not None else f"{self._crc32:08x}"
        wanted = self._checksum
        if digest == wanted.digest:
            return None
        return f"{wanted.what}: {wanted.algorithm} is {digest}, should be {wanted.digest}"


def published_checksum(path: Path, nbytes: int) -> Checksum | None:
    """The sha256 of a whole file, where the download left it: beside it, in the hub's notes, or in a link's name.

    `FILE.sha256` is what sha256sum(1) writes; `.cache/huggingface/download/FILE.metadata` has it as its second line;
    in the hub's cache the file is a symbolic link to a blob named by it. `nbytes` is the file's size.
    """
    notes = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    beside = path.with_name(f"{path.name}.sha256")
    found = _first_word(beside, line=0) or _first_word(notes, line=1) or _link_name(path)
    return Checksum("whole file", 0, nbytes, "sha256", found) if found else None


def lfs_pointer(path: Path) -> bool:
    """Whether this is the short text that git keeps in place of a large file (git-lfs specification, version 1).

    Raises OSError.
    """
    if path.stat().st_size > 1024:
        return False
    return path.read_bytes().startswith(b"version https://git-lfs.github.com/spec/v1")


def _first_word(path: Path, line: int) -> str | None:
    try:
        words = path.read_text(encoding="utf-8").splitlines()[line].split()
    except (OSError, UnicodeDecodeError, IndexError):
        return None
    return words[0] if words and _SHA256.fullmatch(words[0]) else None


def _link_name(path: Path) -> str | None:
    target = path.resolve().name
    return target if path.is_symlink() and _SHA256.fullmatch(target) else None
