"""What a pack in progress has on disk, so that it goes on after a kill: the source's table, and a journal per file.

Everything is in the folder `.pack` of the output and is replaced whole, by rename. The journal of a file says up to
where its data is known to be on the device; what lies behind that is written again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from shared.checkpoint.checksums import Checksum
from shared.checkpoint.direct_file import SECTOR_BYTES
from shared.checkpoint.index import fingerprint_of
from shared.checkpoint.manifest import packed_file_from_json, packed_file_json
from shared.checkpoint.named_errors import naming
from shared.checkpoint.pack_layout import OutputFile
from shared.checkpoint.safetensors_header import TensorInfo
from shared.checkpoint.safetensors_writer import TensorSpec
from shared.errors import CheckpointError, LockedError

STATE_NAME = ".pack"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceTable:
    """The source as it was when packing began: its shards may be deleted before the end."""

    directory: Path
    fingerprint: str
    tensors: dict[str, TensorInfo]


@dataclass(slots=True)
class Journal:
    """How far one output file is: its first `len(checksums)` stretches are safe. `complete` when all are."""

    checksums: list[Checksum] = field(default_factory=list)
    complete: bool = False


class PackState:
    """The folder `.pack` of one output directory, held by this process alone."""

    def __init__(self, out: Path) -> None:
        self._folder = out / STATE_NAME
        self._folder.mkdir(exist_ok=True)
        self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise LockedError(f"{out}: another process is packing into it; wait for it to end") from error

    def __enter__(self) -> PackState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._lock)

    def source(self) -> SourceTable | None:
        """The table that an earlier run left; None if there is none. Raises CheckpointError if it is damaged."""
        return self._read("source.json", _source_table)

    def begin(self, source: SourceTable) -> None:
        """Remember the source's table for later runs."""
        tensors = {n: (i.file.name, i.dtype, i.shape, i.offset, i.nbytes) for n, i in source.tensors.items()}
        content = {"directory": str(source.directory), "fingerprint": source.fingerprint, "tensors": tensors}
        self._write("source.json", content)

    def journal(self, file: OutputFile) -> Journal:
        """How far an output file is. Raises CheckpointError if what is noted is damaged, or not about this file."""
        return self._read(f"{file.name}.json", lambda table: _journal(table, file)) or Journal()

    def record(self, file: OutputFile, checksums: list[Checksum], complete: bool) -> None:
        """The first stretches of `file`, whose checksums these are, are on the device."""
        content = {"file": packed_file_json(file.packed(checksums)), "complete": complete}
        self._write(f"{file.name}.json", content)

    def remove(self) -> None:
        """The pack is finished."""
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def _read(self, name: str, parse: Callable[[Any], T]) -> T | None:
        path = self._folder / name
        try:
            return parse(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged ({error!r}); delete it and give the same command again") from error

    def _write(self, name: str, content: object) -> None:
        write_atomically(self._folder / name, json.dumps(content))


def _source_table(table: Any) -> SourceTable:
    directory = Path(table["directory"])
    tensors = {name: _tensor(directory, *row) for name, row in table["tensors"].items()}
    if fingerprint_of(tensors) != table["fingerprint"]:
        raise ValueError("its tensors are not those of its fingerprint")
    return SourceTable(directory, table["fingerprint"], tensors)


def _tensor(directory: Path, file: str, dtype: str, shape: list[int], offset: int, nbytes: int) -> TensorInfo:
    if TensorSpec(file, dtype, tuple(shape)).nbytes != nbytes:
        raise ValueError(f"{dtype} {shape} does not need {nbytes!r} bytes")
    return TensorInfo(directory / file, dtype, tuple(shape), offset, nbytes)


def _journal(table: Any, file: OutputFile) -> Journal:
    packed, complete = packed_file_from_json(table["file"]), table["complete"]
    stretches = list(file.stretches())
    safe = stretches[: len(packed.checksums)]
    if packed != file.packed(packed.checksums) or [row[:3] for row in packed.checksums] != [s[:3] for s in safe]:
        raise ValueError(f"not about {file.name}")
    if type(complete) is not bool or (complete and len(safe) < len(stretches)):
        raise ValueError(f"complete is {complete!r} with {len(safe)} of {len(stretches)} stretches")
    if not complete and safe and safe[-1].end % SECTOR_BYTES:
        raise ValueError(f"nobody stops writing at byte {safe[-1].end}")
    return Journal(list(packed.checksums), complete)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file whole: after a kill or a power cut it has the old content or the new. OSErrors name a file."""
    temporary = path.with_name(f"{path.name}.new")
    with naming(path), open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Put renames and deletions inside a directory on the device."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)
