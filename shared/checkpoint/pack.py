"""Rewrites a checkpoint so that each expert is one aligned read: `icebox pack`.

Streams from shards to one file per layer, goes on where a killed run stopped, and can give each shard's space back once
its content is safe in the pack. The result is plain safetensors with the published names, an index and a manifest.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import INDEX_NAME, SINGLE_NAME, TensorIndex, read_weight_map
from shared.checkpoint.manifest import MANIFEST_NAME, Manifest, PackedFile, load_manifest
from shared.checkpoint.pack_file import JOURNAL_BYTES, is_whole, write_output
from shared.checkpoint.pack_layout import OutputFile, output_files
from shared.checkpoint.pack_source import Shards, copy_small_files, needed_space
from shared.checkpoint.pack_state import STATE_NAME, PackState, SourceTable, write_atomically
from shared.checkpoint.pack_stretches import source_checksums
from shared.checkpoint.schedule import problems
from shared.checkpoint.verify_data import examine
from shared.errors import CapacityError, CheckpointError

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class PackReport:
    """What the pack holds, and how much of the source this run deleted. Bytes."""

    path: Path
    files: int
    nbytes: int
    freed: int


def pack(
    source: Path,
    out: Path,
    delete_source: bool = False,
    progress: Progress = lambda done, total: None,
    journal_bytes: int = JOURNAL_BYTES,
) -> PackReport:
    """Pack `source` into `out`, or go on with it. A kill costs at most `journal_bytes` of work.

    Raises:
        CheckpointError: the source is not whole or has changed, or something cannot be read or written; what was done
            so far is kept, and the same call goes on.
        CapacityError: too little free space.
        LockedError: another process is at it.
    """
    config = ModelConfig.from_dir(source)
    try:
        with _state(source, out) as state:
            finished = _load_whole(out)
            table = state.source()
            if finished and not table and _is_used_up(source):
                if config != ModelConfig.from_dir(out):
                    raise _other_checkpoint(out)
                state.remove()
                return _report(out, finished)
            begun = table is not None
            table = table or _new_source(source, config)
            if table.directory != source.resolve():
                raise CheckpointError(f"{out}: holds a pack of {table.directory}, begun earlier; finish or delete it")
            return _Packing(table, out, state, delete_source, progress, journal_bytes).run(finished, begun)
    except OSError as error:
        raise CheckpointError(_advice(error)) from error


def _state(source: Path, out: Path) -> PackState:
    try:
        _check_places(source, out)
        out.mkdir(parents=True, exist_ok=True)
        return PackState(out)
    except (OSError, RuntimeError) as error:
        # Python calls links in a circle a RuntimeError.
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{out}: cannot be packed into ({reason}); choose another place") from error


def _check_places(source: Path, out: Path) -> None:
    if out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{out}: lies inside the source; choose another place")
    ours = (out / STATE_NAME).exists() or (out / MANIFEST_NAME).exists()
    if out.exists() and not ours and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists and is not a pack; choose another name or delete it")


def _load_whole(out: Path) -> Manifest | None:
    """The manifest of a finished pack that has all its files."""
    manifest = load_manifest(out)
    for name, file in manifest.files.items() if manifest else ():
        if not is_whole(out / name, file.nbytes):
            raise CheckpointError(f"{out / name}: missing or truncated; pack the checkpoint anew, into another place")
    return manifest


def _is_used_up(source: Path) -> bool:
    """Whether none of the source's shards is left: what a pack that deletes its source leaves behind."""
    names = read_weight_map(source).values() if (source / INDEX_NAME).exists() else [SINGLE_NAME]
    return not any((source / name).exists() for name in set(names))


def _other_checkpoint(out: Path) -> CheckpointError:
    return CheckpointError(f"{out}: is a finished pack of another checkpoint; choose another name")


def _report(out: Path, manifest: Manifest, freed: int = 0) -> PackReport:
    return PackReport(out, len(manifest.files), sum(file.nbytes for file in manifest.files.values()), freed)


def _new_source(source: Path, config: ModelConfig) -> SourceTable:
    if load_manifest(source):
        raise CheckpointError(f"{source}: is a pack already")
    index = TensorIndex.open(source)
    for problem in problems(index, config):
        raise CheckpointError(f"{source}: {problem}; `icebox verify` lists everything that is wrong")
    return SourceTable(source.resolve(), index.fingerprint, dict(index.tensors))


def _advice(error: OSError) -> str:
    # Of two names, as of a copy, the second is what was written to.
    name = error.filename2 or error.filename
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{name}: no space left; free some and give the same command again: it goes on from here"
    return f"{name}: {error.strerror}; give the same command again to go on from here"


@dataclass(slots=True)
class _Packing:
    """One run from where things stand to the end."""

    source: SourceTable
    out: Path
    state: PackState
    delete_source: bool
    progress: Progress
    journal_bytes: int
    done: int = 0
    freed: int = 0
    packed: dict[str, PackedFile] = field(default_factory=dict)

    def run(self, finished: Manifest | None, begun: bool) -> PackReport:
        """`begun` if an earlier run stopped in the middle, of packing or of deleting the source."""
        files = output_files(self.source.tensors)
        total = sum(file.nbytes for file in files)
        shards = Shards(self.source, files)
        if finished is None:
            self._check_space(files, shards)
            copy_small_files(self.source.directory, self.out)
        elif finished.source != self.source.fingerprint:
            raise _other_checkpoint(self.out)
        elif self.delete_source and not begun:
            self._compare(files, finished, total)
        if finished is None or self.delete_source:
            self.state.begin(self.source)
        for file in files:
            self.packed[file.name] = finished.files[file.name] if finished else self._write(file, shards, total)
            if self.delete_source and shards.left_of(file):
                self._verify(file)
                self.freed += shards.free_after(file)
        manifest = finished or Manifest(self.source.fingerprint, self.packed)
        if finished is None:
            self._write_tables(files, manifest)
        self.state.remove()
        return _report(self.out, manifest, self.freed)

    def _check_space(self, files: list[OutputFile], shards: Shards) -> None:
        needed, free = needed_space(files, self.source.directory, shards if self.delete_source else None, self.out)
        if needed > free:
            hint = "" if self.delete_source else "; --delete-source needs room for little more than one layer"
            raise CapacityError(f"{self.out}: needs {needed:,} bytes more, the file system has {free:,} free{hint}")

    def _write(self, file: OutputFile, shards: Shards, total: int) -> PackedFile:
        def advance(nbytes: int) -> None:
            self.done += nbytes
            self.progress(self.done, total)

        return write_output(file, self.source, shards, self.out, self.state, advance, self.journal_bytes)

    def _compare(self, files: list[OutputFile], finished: Manifest, total: int) -> None:
        """Refuse a source of other data under the same headers, as those of a fine-tune are: it is not to be lost."""
        for file in files:
            if source_checksums(self.source, file) != list(finished.files[file.name].checksums):
                raise CheckpointError(
                    f"{self.out / file.name}: made from other data than {self.source.directory} holds; nothing was "
                    f"deleted; choose another name"
                )
            self.done += file.nbytes
            self.progress(self.done, total)

    def _verify(self, file: OutputFile) -> None:
        """Read back from the device what is about to become the only copy."""
        packed = self.packed[file.name]
        checksums = {file.name: packed.with_header()}
        for name, text in examine(self.out, {file.name: ({}, packed.nbytes)}, checksums, 0, lambda done, total: None):
            raise CheckpointError(
                f"{self.out / name}: {text}; nothing of its source was deleted; is the drive failing?"
            )

    def _write_tables(self, files: list[OutputFile], manifest: Manifest) -> None:
        weight_map = {spec.name: file.name for file in files for spec in file.specs}
        size = sum(spec.nbytes for file in files for spec in file.specs)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_atomically(self.out / INDEX_NAME, json.dumps(index))
        write_atomically(self.out / MANIFEST_NAME, json.dumps(manifest.to_json()))
