"""Reads records from the checkpoint's files, past the page cache where the file system allows it.

O_DIRECT wants file offsets, lengths and memory aligned to the drive's blocks (open(2)), and tensors lie where they
lie: so a read takes the aligned stretch around them to staging memory, and the pieces are put into the slot from there,
as they arrive; an aligned record in one piece goes straight into a slot that takes it. Never reads beyond what the
header declares; refuses a file that has changed since it was opened.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from services.expertd.landing import Bytes, SlotWriter
from services.expertd.reads import Reads, Stretch
from shared.checkpoint.direct_file import SECTOR_BYTES
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
        self._drive = threading.Semaphore(depth)  # checking a record, or waiting for its copy, takes no place
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
            nbytes = self._read_record(plan, slot, reads)
        except OSError as error:
            file = error.filename or plan.extents[0].file
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

    def _read_record(self, plan: ReadPlan, slot: SlotWriter, reads: Reads) -> int:
        files = [self._open(extent.file) for extent in plan.extents]
        targets = _targets(plan, slot)
        try:
            return self._fill(targets, files, slot, reads)
        except OSError as error:
            if error.errno not in NOT_DIRECT or not any(file.is_direct for file in files):
                raise
            return self._fill(targets, [self._reopen(extent.file) for extent in plan.extents], slot, reads)
        finally:  # now and not first: the drive is asked sooner, and the last copy runs meanwhile
            for extent, file in zip(plan.extents, files, strict=True):
                _check_unchanged(extent.file, file)

    def _fill(self, targets: Sequence[_Target], files: Sequence[_OpenFile], slot: SlotWriter, reads: Reads) -> int:
        """All of them into their places in the slot; the number of bytes asked of the drive."""
        stretches = [target.stretch(file.descriptor) for target, file in zip(targets, files, strict=True)]
        with self._drive, closing(reads.read(stretches)) as arrivals:
            for number, begin, end, wanted in arrivals:
                target = targets[number]
                end = target.complete(stretches[number], end, wanted)
                if target.is_staging:
                    target.put(slot, begin, end)
        for file, target in zip(files, targets, strict=True):
            if not file.is_direct:
                os.posix_fadvise(file.descriptor, target.offset, len(target.out), os.POSIX_FADV_DONTNEED)
        return sum(len(target.out) for target in targets)

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


class _Target(NamedTuple):
    """Memory for the blocks of an extent, which begin at `offset` of the file: the slot itself, or staging."""

    extent: Extent
    offset: int
    out: Bytes
    is_staging: bool

    def stretch(self, descriptor: int) -> Stretch:
        return Stretch(self.extent.file, descriptor, self.offset, self.out)

    def complete(self, stretch: Stretch, end: int, wanted: int) -> int:
        """Read what is missing up to `wanted`; to where there is something now.

        The last block of a file may be short, but not of what the extent covers.
        """
        needed = self.extent.offset + self.extent.nbytes - self.offset
        while end < min(wanted, needed):
            count = stretch.read(end, wanted)
            if count == 0:
                file, last = self.extent.file, self.offset + needed
                raise CheckpointError(f"{file}: ends before byte {last}: truncated; download it again")
            end += count
        return min(end, needed)

    def put(self, slot: SlotWriter, begin: int, end: int) -> None:
        """What lies between `begin` and `end` of `out`, into its places in the slot."""
        skipped = self.extent.offset - self.offset
        for source, target, nbytes in self.extent.pieces:
            at = skipped + source
            first, last = max(begin, at), min(end, at + nbytes)
            if first < last:
                slot.put(target + first - at, self.out[first:last])


def _targets(plan: ReadPlan, slot: SlotWriter) -> list[_Target]:
    """Blocks go straight into the slot if nothing else of the record is there that they could cover."""
    windows = [_window(extent) for extent in plan.extents]
    outs = [_straight(extent, *window, plan, slot) for extent, window in zip(plan.extents, windows, strict=True)]
    staged = sum(nbytes for (_, nbytes), out in zip(windows, outs, strict=True) if out is None)
    staging, used, targets = slot.staging(staged) if staged else None, 0, []
    for extent, (offset, nbytes), out in zip(plan.extents, windows, outs, strict=True):
        if out is not None:
            targets.append(_Target(extent, offset, out, is_staging=False))
        else:
            assert staging is not None
            targets.append(_Target(extent, offset, staging[used : used + nbytes], is_staging=True))
            used += nbytes
    return targets


def _window(extent: Extent) -> tuple[int, int]:
    """Offset and length of the blocks that cover it."""
    begin = extent.offset // SECTOR_BYTES * SECTOR_BYTES
    return begin, -(-(extent.offset + extent.nbytes) // SECTOR_BYTES) * SECTOR_BYTES - begin


def _straight(extent: Extent, offset: int, length: int, plan: ReadPlan, slot: SlotWriter) -> Bytes | None:
    (_, target, nbytes), *others = extent.pieces
    is_aligned = offset == extent.offset and target % SECTOR_BYTES == 0
    is_whole = not others and is_aligned and (len(plan.extents) == 1 or nbytes == length)
    return slot.memory(target, length) if is_whole else None


def _check_unchanged(path: Path, file: _OpenFile) -> None:
    status = os.stat(path)
    if (status.st_ino, status.st_size) != (file.inode, file.size):
        raise CheckpointError(f"{path}: was replaced or changed its size while in use; restart with an intact file")
