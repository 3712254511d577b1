"""Reads stretches of a large file at disk speed, past the page cache, a few ahead of the one being looked at.

Owns the alignment that O_DIRECT asks for. Knows nothing about what it reads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from shared.checkpoint.direct_file import SECTOR_BYTES, open_direct
from shared.checkpoint.named_errors import naming
from shared.memory.io_buffer import io_buffer


class Span(NamedTuple):
    """A stretch of a file."""

    offset: int
    nbytes: int


class DirectReader:
    """One file, open for reading. Errors are OSErrors that name it; a file that ends too early gives EOFError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_direct(path, os.O_RDONLY).fd

    def read(self, span: Span, buffer: memoryview) -> memoryview:
        """The bytes of `span`, inside `buffer` (an `io_buffer`), which must have `window_bytes(span.nbytes)`."""
        begin = span.offset - span.offset % SECTOR_BYTES
        end = span.offset + span.nbytes
        wanted = end - begin
        done = 0
        while done < wanted:
            count = self._read_at(buffer[done : -(-wanted // SECTOR_BYTES) * SECTOR_BYTES], begin + done)
            done += count
            # A short read in the middle of a sector is the end of the file.
            if count == 0 or (done < wanted and done % SECTOR_BYTES):
                raise EOFError(f"{self.path}: ends at byte {begin + done}, before {end}; truncated")
        return buffer[span.offset - begin : wanted]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _read_at(self, target: memoryview, offset: int) -> int:
        with naming(self.path):
            return os.preadv(self._fd, [target], offset)


def read_ahead(stretches: Iterable[tuple[DirectReader, Span]], largest: int, depth: int) -> Iterator[memoryview]:
    """The bytes of each stretch (`largest` at most) in order, `depth` reads ahead; valid until the next."""
    window = window_bytes(largest)
    memory = io_buffer((depth + 1) * window)
    buffers = deque(memory[start : start + window] for start in range(0, len(memory), window))
    reads: deque[Future[memoryview]] = deque()
    with ThreadPoolExecutor(depth) as pool:
        for file, span in stretches:
            reads.append(pool.submit(file.read, span, buffers[0]))
            buffers.rotate(-1)
            if len(reads) == depth:
                yield reads.popleft().result()
        while reads:
            yield reads.popleft().result()


def window_bytes(nbytes: int) -> int:
    """The size of a buffer that takes any span of so many bytes with the sectors around it."""
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES + SECTOR_BYTES


def spans_of(begin: int, end: int, block_bytes: int) -> Iterator[Span]:
    """Cut a stretch into blocks that end at multiples of `block_bytes`."""
    while begin < end:
        stop = min(end, begin - begin % block_bytes + block_bytes)
        yield Span(begin, stop - begin)
        begin = stop
