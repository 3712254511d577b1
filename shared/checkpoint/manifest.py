"""The manifest of a packed checkpoint: which source it was made from, and the checksum of every stretch of every file.

Owns the file `icebox-pack.json`. A stretch is an expert's record, or a tensor that is none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.checkpoint.checksums import Checksum
from shared.errors import CheckpointError

MANIFEST_NAME = "icebox-pack.json"
FORMAT = 1

_CRC32 = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Size, sha256 of the header, and the crc32 of each stretch of the data."""

    nbytes: int
    header_sha256: str
    checksums: tuple[Checksum, ...]

    def with_header(self) -> list[Checksum]:
        """The checksums of the file from its first byte on, the header's too."""
        begin = min((checksum.offset for checksum in self.checksums), default=self.nbytes)
        return [Checksum("header", 0, begin, "sha256", self.header_sha256), *self.checksums]


@dataclass(frozen=True, slots=True)
class Manifest:
    """`source` is the fingerprint of the source's headers."""

    source: str
    files: dict[str, PackedFile]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "source": self.source,
            "files": {name: packed_file_json(file) for name, file in self.files.items()},
        }


def packed_file_json(file: PackedFile) -> dict[str, Any]:
    """One file's part, one row per stretch: name, offset, bytes, crc32."""
    rows = [[c.what, c.offset, c.nbytes, c.digest] for c in file.checksums]
    return {"nbytes": file.nbytes, "header_sha256": file.header_sha256, "crc32": rows}


def packed_file_from_json(table: dict[str, Any]) -> PackedFile:
    """The inverse of `packed_file_json`. Raises KeyError, TypeError or ValueError if it is not one."""
    rows = tuple(_checksum(*row) for row in table["crc32"])
    return PackedFile(_count("nbytes", table["nbytes"]), str(table["header_sha256"]), rows)


def _checksum(what: Any, offset: Any, nbytes: Any, digest: Any) -> Checksum:
    if not isinstance(digest, str) or not _CRC32.fullmatch(digest):
        raise ValueError(f"{what}: crc32 must be eight hex digits, not {digest!r}")
    return Checksum(str(what), _count(f"{what}: offset", offset), _count(f"{what}: bytes", nbytes), "crc32", digest)


def _count(key: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{key} must be a number of bytes, not {value!r}")
    return value


def load_manifest(directory: Path) -> Manifest | None:
    """The manifest of a packed directory; None if there is none.

    Raises:
        CheckpointError: it is there but cannot be used.
    """
    path = directory / MANIFEST_NAME
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {table['format']!r} is not {FORMAT}; pack the checkpoint again")
        return Manifest(str(table["source"]), {n: packed_file_from_json(t) for n, t in table["files"].items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error!r}); pack the checkpoint again") from error


def record_checksums(directory: Path) -> dict[str, int]:
    """{record name, such as "layers.0.ffn.experts.7": crc32 of its bytes} of a packed directory.

    Raises:
        CheckpointError: it is not packed, so that there are none.
    """
    manifest = load_manifest(directory)
    if manifest is None:
        raise CheckpointError(
            f"{directory}: reader.verify needs the checksums of a packed checkpoint; pack this one or set it to false"
        )
    rows = (checksum for file in manifest.files.values() for checksum in file.checksums)
    return {row.what: int(row.digest, 16) for row in rows if ".ffn.experts." in row.what}
