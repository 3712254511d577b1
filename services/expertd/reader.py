"""Reads records from the checkpoint's files, past the page cache where the file system allows it.

O_DIRECT wants file offsets, lengths and memory aligned to the drive's blocks (open(2)), and tensors lie where they
lie: so a read takes the aligned stretch around them to staging memory, and the pieces are put into the slot from there,
as they arrive; an aligned record in one piece goes straight into a slot that takes it. Never reads past the header's
word, nor from a changed file.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from services.expertd.landing import Bytes, SlotWriter
from services.expertd.reads import BLOCK, Reads
from shared.checkpoint.records import Extent, ReadPlan
from shared.errors import CheckpointError

log = logging.getLogger(__name__)

# What file systems without O_DIRECT say, at open or at the first read.
NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    descriptor: int
    inode: int
    size: int
    is_direct: bool


class RecordReader:
    """Open files of a checkpoint, shared by reader threads; each thread brings its own `SlotWriter` and `Reads`.

    `checksums` are the crc32 of records by name, compared on every read; records without one are taken as they are.
    """

    def __init__(self, direct: bool, depth: int, checksums: Mapping[str, int] | None = None) -> None:
        self._direct = direct
        self._drive = threading.Semaphore(depth)  # reads in flight; threads that copy or check take no place
        self._checksums = checksums or {}
        self._files: dict[Path, _OpenFile] = {}
        self._outdated: list[_OpenFile] = []  # other threads may be reading from them
        self._lock = threading.Lock()

    @property
    def is_direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct

    def open(self, files: Iterable[Path]) -> None:
        """Open files before anything is read from them, so that from now on a change of theirs is noticed.

        Raises:
            CheckpointError: one cannot be opened.
        """
        for path in files:
            try:
                self._open(path)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot open ({error.strerror})") from error

    def read(self, plan: ReadPlan, slot: SlotWriter, reads: Reads) -> int:
        """Read a record into a slot; the number of bytes asked of the drive.

        Raises:
            CheckpointError: a file is gone, unreadable, truncated or replaced, or the record's checksum is another.
                Names record and file.
        """
        try:
            is_alone = len(plan.extents) == 1
            nbytes = sum(self._read_extent(extent, slot, reads, is_alone) for extent in plan.extents)
        except OSError as error:
            file = error.filename or plan.extents[0].file  # preadv does not say
            raise CheckpointError(f"{file}: cannot read {plan.name} ({error.strerror})") from error
        self._compare(plan, slot)
        return nbytes

    def close(self) -> None:
        for file in (*self._files.values(), *self._outdated):
            os.close(file.descriptor)
        self._files.clear()
        self._outdated.clear()

    def _compare(self, plan: ReadPlan, slot: SlotWriter) -> None:
        expected = self._checksums.get(plan.name)
        if expected is None:
            return
        length = sum(piece.nbytes for extent in plan.extents for piece in extent.pieces)
        if slot.crc32(length) != expected:
            raise CheckpointError(
                f"{plan.extents[0].file}: {plan.name} is damaged (crc32 differs from the manifest's); pack it again"
            )

    def _read_extent(self, extent: Extent, slot: SlotWriter, reads: Reads, is_alone: bool) -> int:
        file = self._open(extent.file)
        _check_unchanged(extent.file, file)
        try:
            return self._fill(file, extent, slot, reads, is_alone)
        except OSError as error:
            if not (file.is_direct and error.errno in NOT_DIRECT):
                raise
        return self._fill(self._reopen(extent.file), extent, slot, reads, is_alone)

    def _fill(self, file: _OpenFile, extent: Extent, slot: SlotWriter, reads: Reads, is_alone: bool) -> int:
        """One extent into its places in the slot; the number of bytes asked of the drive.

        Blocks go straight into the slot if nothing else of the record is there that they could cover.
        """
        begin = extent.offset // BLOCK * BLOCK
        end = -(-(extent.offset + extent.nbytes) // BLOCK) * BLOCK
        (_, target, nbytes), *others = extent.pieces
        is_aligned = begin == extent.offset and target % BLOCK == 0
        is_whole = not others and is_aligned and (is_alone or nbytes == end - begin)
        memory = slot.memory(target, end - begin) if is_whole else None
        out = slot.staging(end - begin) if memory is None else memory
        with closing(self._arrivals(file, extent, begin, out, reads)) as arrivals:
            for first, last in arrivals:
                if memory is None:
                    _put(slot, extent, out, extent.offset - begin, first, last)
        if not file.is_direct:
            os.posix_fadvise(file.descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
        return end - begin

    def _arrivals(
        self, file: _OpenFile, extent: Extent, offset: int, out: Bytes, reads: Reads
    ) -> Generator[tuple[int, int], None, None]:
        """Fill `out` from `offset`: (begin, end) of what is there, in any order.

        The last block of a file may be short, but not of what the extent covers.
        """
        needed = extent.offset + extent.nbytes - offset
        with self._drive, closing(reads.read(file.descriptor, offset, out)) as pieces:
            for begin, end, wanted in pieces:
                while end < min(wanted, needed):
                    count = os.preadv(file.descriptor, [out[end:wanted].data], offset + end)
                    if count == 0:
                        raise CheckpointError(
                            f"{extent.file}: ends before byte {offset + needed}: truncated; download it again"
                        )
                    end += count
                yield begin, min(end, needed)

    def _open(self, path: Path) -> _OpenFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = self._open_file(path)
            return file

    def _reopen(self, path: Path) -> _OpenFile:
        """The file system took O_DIRECT when the file was opened, and refused the read."""
        with self._lock:
            file = self._files[path]
            if file.is_direct:
                self._give_up_direct(path)
                self._outdated.append(file)
                file = self._files[path] = self._open_file(path)
            return file

    def _open_file(self, path: Path) -> _OpenFile:
        descriptor = self._open_descriptor(path)
        status = os.fstat(descriptor)
        return _OpenFile(descriptor, status.st_ino, status.st_size, self._direct)

    def _open_descriptor(self, path: Path) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                self._give_up_direct(path)
        return os.open(path, flags)

    def _give_up_direct(self, path: Path) -> None:
        if self._direct:
            log.warning("no O_DIRECT here, reading through the page cache file=%s", path)
        self._direct = False


def _put(slot: SlotWriter, extent: Extent, out: Bytes, skipped: int, begin: int, end: int) -> None:
    """What lies between `begin` and `end` of `out`, which has the extent behind `skipped` bytes, into its places."""
    for source, target, nbytes in extent.pieces:
        at = skipped + source
        first, last = max(begin, at), min(end, at + nbytes)
        if first < last:
            slot.put(target + first - at, out[first:last])


def _check_unchanged(path: Path, file: _OpenFile) -> None:
    status = os.stat(path)
    if (status.st_ino, status.st_size) != (file.inode, file.size):
        raise CheckpointError(f"{path}: was replaced or changed its size while in use; restart with an intact file")
