"""Writes a large file from front to back at disk speed: O_DIRECT, one block being filled while others are written.

Owns the alignment that O_DIRECT asks for. Knows nothing about what it writes. Little of what it wrote stays in the
page cache.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from shared.checkpoint.direct_file import SECTOR_BYTES, open_direct
from shared.checkpoint.named_errors import naming
from shared.memory.io_buffer import io_buffer

BLOCK_BYTES = 8 << 20
BLOCKS = 4


class StreamWriter:
    """A file opened for writing at `position`, a multiple of `SECTOR_BYTES`; what lay behind it is cut off.

    Use as a context manager: leaving it normally writes the rest, flushes it to the device and closes. After an error
    the file holds a prefix of what was written. Errors are OSErrors that name the file.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        assert position % SECTOR_BYTES == 0
        self._path = path
        self._fd = open_direct(path, os.O_WRONLY | os.O_CREAT).fd
        with naming(path):
            os.ftruncate(self._fd, position)
        os.lseek(self._fd, position, os.SEEK_SET)
        memory = io_buffer(BLOCKS * BLOCK_BYTES)
        self._blocks = deque(memory[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(BLOCKS))
        self._filled = 0
        self._thread = ThreadPoolExecutor(1)
        self._writes: deque[Future[None]] = deque()
        self._failed = False

    def write(self, data: memoryview) -> None:
        """Take the bytes of `data` (contiguous, one byte an item); it may be reused when this returns."""
        done = 0
        while done < len(data):
            count = min(len(data) - done, BLOCK_BYTES - self._filled)
            self._blocks[0][self._filled : self._filled + count] = data[done : done + count]
            done, self._filled = done + count, self._filled + count
            if self._filled == BLOCK_BYTES:
                self._swap()

    def sync(self) -> None:
        """Wait until everything so far is on the device; it must end at a multiple of `SECTOR_BYTES`."""
        assert self._filled % SECTOR_BYTES == 0
        self._finish()

    def close(self) -> None:
        """Write what is left and wait until all of it is on the device."""
        self._finish()
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the file as it is."""
        if self._fd >= 0:
            self._thread.shutdown(wait=True)
            os.close(self._fd)
            self._fd = -1
            self._blocks.clear()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self.abandon()

    def _finish(self) -> None:
        self._swap()
        while self._writes:
            self._wait()
        with naming(self._path):
            os.fdatasync(self._fd)

    def _swap(self) -> None:
        self._writes.append(self._thread.submit(self._flush, self._blocks[0], self._filled))
        self._blocks.rotate(-1)
        self._filled = 0
        if len(self._writes) == len(self._blocks):
            self._wait()

    def _wait(self) -> None:
        """Until the oldest write is done and its block free."""
        with naming(self._path):
            self._writes.popleft().result()

    def _flush(self, block: memoryview, length: int) -> None:
        # What follows a write that failed must not land in its place.
        if self._failed:
            return
        try:
            self._append(block, length)
        except OSError:
            self._failed = True
            raise

    def _append(self, block: memoryview, length: int) -> None:
        aligned = length - length % SECTOR_BYTES
        _write_all(self._fd, block[:aligned])
        if aligned < length:
            _leave_direct(self._fd)
            _write_all(self._fd, block[aligned:length])


def _leave_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _write_all(fd: int, data: memoryview) -> None:
    while len(data):
        # A disk that fills up cuts the write; the next one then says ENOSPC.
        data = data[os.write(fd, data) :]
        if len(data) % SECTOR_BYTES:
            _leave_direct(fd)
