"""Writes one file of a pack from its source shards, from wherever an earlier run got to.

Reads a few stretches ahead, checksums what it writes, and notes in the journal what is safe on the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from shared.checkpoint.checksums import Checksum
from shared.checkpoint.direct_file import SECTOR_BYTES
from shared.checkpoint.direct_reader import DirectReader, Span, read_ahead, spans_of
from shared.checkpoint.manifest import PackedFile
from shared.checkpoint.pack_layout import OutputFile, Stretch
from shared.checkpoint.pack_source import Shards
from shared.checkpoint.pack_state import Journal, PackState, SourceTable, sync_directory
from shared.checkpoint.stream_writer import StreamWriter
from shared.errors import CheckpointError

READ_BYTES = 8 << 20
READS_AHEAD = 4
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
        with ExitStack() as files:
            data = read_ahead(self._spans(stretches, files), READ_BYTES, READS_AHEAD)
            for stretch in stretches:
                checksums.append(self._stretch(writer, stretch, data))
                unsafe += stretch.nbytes
                if unsafe >= self._journal_bytes and stretch.end % SECTOR_BYTES == 0:
                    writer.sync()
                    self._state.record(self._file, checksums, complete=False)
                    unsafe = 0
        return checksums

    def _stretch(self, writer: StreamWriter, stretch: Stretch, data: Iterator[memoryview]) -> Checksum:
        crc, left = 0, stretch.nbytes
        while left:
            block = self._next(data)
            crc, left = zlib.crc32(block, crc), left - len(block)
            writer.write(block)
            self._advance(len(block))
        writer.write(memoryview(bytes(stretch.padding)))
        self._advance(stretch.padding)
        return Checksum(stretch.what, stretch.offset, stretch.nbytes, "crc32", f"{crc:08x}")

    def _next(self, data: Iterator[memoryview]) -> memoryview:
        try:
            return next(data)
        except EOFError as error:
            raise CheckpointError(f"{error}; download it again and give the same command again") from error

    def _spans(self, stretches: list[Stretch], files: ExitStack) -> Iterator[tuple[DirectReader, Span]]:
        readers: dict[Path, DirectReader] = {}
        for stretch in stretches:
            for name in stretch.tensors:
                info = self._source.tensors[name]
                if info.file not in readers:
                    readers[info.file] = files.enter_context(DirectReader(info.file))
                for span in spans_of(info.offset, info.offset + info.nbytes, READ_BYTES):
                    yield readers[info.file], span
