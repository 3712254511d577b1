"""What a pack in progress has on disk, so that it goes on after a kill: the source's table, and a journal per file.

Everything is in the folder `.pack` of the output and is replaced whole, by rename. The journal of a file says up to
where its data is known to be on the device; what lies behind that is written again.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.checkpoint.checksums import Checksum
from shared.checkpoint.manifest import PackedFile, packed_file_from_json, packed_file_json
from shared.checkpoint.safetensors_header import TensorInfo
from shared.errors import CheckpointError, LockedError

STATE_NAME = ".pack"


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
        """The table that an earlier run left; None if there is none."""
        table = self._read("source.json")
        if table is None:
            return None
        directory = Path(table["directory"])
        tensors = {n: TensorInfo(directory / f, d, tuple(s), o, b) for n, (f, d, s, o, b) in table["tensors"].items()}
        return SourceTable(directory, table["fingerprint"], tensors)

    def begin(self, source: SourceTable) -> None:
        """Remember the source's table for later runs."""
        tensors = {n: (i.file.name, i.dtype, i.shape, i.offset, i.nbytes) for n, i in source.tensors.items()}
        content = {"directory": str(source.directory), "fingerprint": source.fingerprint, "tensors": tensors}
        self._write("source.json", content)

    def journal(self, name: str) -> Journal:
        """How far the output file `name` is."""
        table = self._read(f"{name}.json")
        if table is None:
            return Journal()
        return Journal(list(packed_file_from_json(table["file"]).checksums), table["complete"])

    def record(self, name: str, file: PackedFile, complete: bool) -> None:
        """The stretches of `file` are on the device."""
        self._write(f"{name}.json", {"file": packed_file_json(file), "complete": complete})

    def remove(self) -> None:
        """The pack is finished."""
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def _read(self, name: str) -> Any:
        path = self._folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged ({error}); delete the output directory and pack again") from error

    def _write(self, name: str, content: object) -> None:
        write_atomically(self._folder / name, json.dumps(content))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file whole: after a kill or a power cut it has the old content or the new."""
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Put renames and deletions inside a directory on the device."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
