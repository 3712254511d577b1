"""Reads the stretches of a pack's file from the source's shards, a few reads ahead, and checksums them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from shared.checkpoint.checksums import Checksum
from shared.checkpoint.direct_reader import DirectReader, Span, read_ahead, spans_of
from shared.checkpoint.pack_layout import OutputFile, Stretch
from shared.checkpoint.pack_state import SourceTable
from shared.errors import CheckpointError

READ_BYTES = 8 << 20
READS_AHEAD = 4


def read_stretches(source: SourceTable, stretches: list[Stretch]) -> Generator[memoryview, None, None]:
    """The bytes of all stretches, in blocks that lie in one stretch each; a block is valid until the next.

    Raises:
        CheckpointError: a shard ends too early.
        OSError: a shard cannot be read.
    """
    with ExitStack() as files:
        try:
            yield from read_ahead(_spans(source, stretches, files), READ_BYTES, READS_AHEAD)
        except EOFError as error:
            raise CheckpointError(f"{error}; download it again and give the same command again") from error


def next_checksum(stretch: Stretch, blocks: Iterator[memoryview], use: Callable[[memoryview], None]) -> Checksum:
    """The checksum of a stretch, whose blocks come next; `use` is given each of them."""
    crc, left = 0, stretch.nbytes
    while left:
        block = next(blocks)
        use(block)
        crc, left = zlib.crc32(block, crc), left - len(block)
    return Checksum(stretch.what, stretch.offset, stretch.nbytes, "crc32", f"{crc:08x}")


def source_checksums(source: SourceTable, file: OutputFile) -> list[Checksum]:
    """Those that `file` would have if it were written now. Raises as `read_stretches`."""
    stretches = list(file.stretches())
    with closing(read_stretches(source, stretches)) as blocks:
        return [next_checksum(stretch, blocks, lambda block: None) for stretch in stretches]


def _spans(source: SourceTable, stretches: list[Stretch], files: ExitStack) -> Iterator[tuple[DirectReader, Span]]:
    readers: dict[Path, DirectReader] = {}
    for stretch in stretches:
        for name in stretch.tensors:
            info = source.tensors[name]
            if info.file not in readers:
                readers[info.file] = files.enter_context(DirectReader(info.file))
            for span in spans_of(info.offset, info.offset + info.nbytes, READ_BYTES):
                yield readers[info.file], span
