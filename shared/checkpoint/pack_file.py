"""Writes one file of a pack from its source shards, from wherever an earlier run got to.

Checksums what it writes, and notes in the journal what is safe on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from shared.checkpoint.checksums import Checksum
from shared.checkpoint.direct_file import SECTOR_BYTES
from shared.checkpoint.manifest import PackedFile
from shared.checkpoint.pack_layout import OutputFile, Stretch
from shared.checkpoint.pack_source import Shards
from shared.checkpoint.pack_state import Journal, PackState, SourceTable, sync_directory
from shared.checkpoint.pack_stretches import next_checksum, read_stretches
from shared.checkpoint.stream_writer import StreamWriter

JOURNAL_BYTES = 256 << 20


def write_output(
    file: OutputFile,
    source: SourceTable,
    shards: Shards,
    out: Path,
    state: PackState,
    advance: Callable[[int], None],
    journal_bytes: int,
) -> PackedFile:
    """Write `file` into `out`, or the rest of it. `advance` is told of every byte of it, old and new.

    A file that its journal calls complete, but that is not there whole any more, is begun anew.

    Raises:
        CheckpointError: a shard has changed or ends too early.
        OSError: something cannot be read or written; the journal is right all the same.
    """
    final, partial = out / file.name, out / f"{file.name}.partial"
    journal = state.journal(file)
    if journal.complete and not is_whole(partial if partial.exists() else final, file.nbytes):
        journal = Journal()
        # Otherwise a kill would leave a journal that calls the new beginnings complete.
        state.record(file, journal.checksums, complete=False)
    if not journal.complete:
        shards.check(file)
        writing = _Writing(file, source, state, advance, journal_bytes)
        journal.checksums = writing.go_on(partial, journal.checksums)
    else:
        advance(file.nbytes)
    if partial.exists():
        partial.replace(final)
        sync_directory(out)
    return file.packed(journal.checksums)


def is_whole(path: Path, nbytes: int) -> bool:
    """Whether a file that was written is still there with its full size."""
    return path.exists() and path.stat().st_size == nbytes


class _Writing:
    def __init__(
        self,
        file: OutputFile,
        source: SourceTable,
        state: PackState,
        advance: Callable[[int], None],
        journal_bytes: int,
    ) -> None:
        self._file = file
        self._source = source
        self._state = state
        self._advance = advance
        self._journal_bytes = journal_bytes

    def go_on(self, path: Path, checksums: list[Checksum]) -> list[Checksum]:
        """Write what `checksums` do not cover; all checksums of the file, which is then complete on the device."""
        stretches = list(self._file.stretches())
        position = stretches[len(checksums) - 1].end if checksums else 0
        if not path.exists() or path.stat().st_size < position:
            checksums, position = [], 0
        self._advance(position)
        with StreamWriter(path, position) as writer:
            if position == 0:
                writer.write(memoryview(self._file.header))
                self._advance(len(self._file.header))
            checksums = self._write(writer, stretches[len(checksums) :], checksums)
        self._state.record(self._file, checksums, complete=True)
        return checksums

    def _write(self, writer: StreamWriter, stretches: list[Stretch], checksums: list[Checksum]) -> list[Checksum]:
        checksums, unsafe = list(checksums), 0

        def use(block: memoryview) -> None:
            writer.write(block)
            self._advance(len(block))

        with closing(read_stretches(self._source, stretches)) as blocks:
            for stretch in stretches:
                checksums.append(next_checksum(stretch, blocks, use))
                use(memoryview(bytes(stretch.padding)))
                unsafe += stretch.nbytes
                if unsafe >= self._journal_bytes and stretch.end % SECTOR_BYTES == 0:
                    writer.sync()
                    self._state.record(self._file, checksums, complete=False)
                    unsafe = 0
        return checksums
