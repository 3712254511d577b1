"""Reads the files of a checkpoint from end to end, once, and tells checksums and value scans what goes by.

Several files at a time, because one hash cannot keep up with a fast drive. Does not know what is expected of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shared.checkpoint.checksums import Checksum, RunningChecksum
from shared.checkpoint.direct_reader import DirectReader, read_ahead, spans_of
from shared.checkpoint.safetensors_header import TensorInfo
from shared.checkpoint.tensor_scan import TensorScan, scan_of

# A block stays in the second-level cache from one look at it to the next, and some reads are always on their way.
BLOCK_BYTES = 2 << 20
READS_AHEAD = 8
# Files read side by side; each has reads of its own ahead.
MOST_FILES_AT_ONCE = 8

Header = Mapping[str, TensorInfo]


def examine(
    directory: Path,
    files: Mapping[str, tuple[Header, int]],
    checksums: Mapping[str, Iterable[Checksum]],
    experts: int,
    progress: Callable[[int, int], None],
) -> list[tuple[str, str]]:
    """(file name, what is wrong) of everything found in the data of `files`, whose headers and sizes are known.

    `progress` gets bytes done and bytes in all.
    """
    total = sum(size for _, size in files.values())
    lock, stop, done = threading.Lock(), threading.Event(), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    def read(name: str) -> list[tuple[str, str]]:
        header, size = files[name]
        watches = _watches(header, checksums.get(name, ()), experts)
        try:
            _stream(directory / name, size, watches, advance, stop)
        except (OSError, EOFError) as error:
            return [(name, f"cannot be read to its end: {error}")]
        return [(name, text) for watch in watches if (text := watch.sink.problem())]

    # The largest first: one that starts late would be read alone in the end, at the speed of one hash.
    order = sorted(files, key=lambda name: -files[name][1])
    with ThreadPoolExecutor(min(MOST_FILES_AT_ONCE, len(os.sched_getaffinity(0)))) as pool:
        try:
            found = dict(zip(order, pool.map(read, order), strict=True))
        finally:
            # Ctrl-C is not to wait for the ends of files.
            stop.set()
    return [problem for name in files for problem in found[name]]


@dataclass(frozen=True, slots=True)
class _Watch:
    """Something that wants the bytes of a file from `begin` to `end`, in order."""

    begin: int
    end: int
    sink: TensorScan | RunningChecksum


def _watches(header: Header, checksums: Iterable[Checksum], experts: int) -> list[_Watch]:
    watches = [_Watch(c.offset, c.offset + c.nbytes, RunningChecksum(c)) for c in checksums]
    for name, info in header.items():
        if (scan := scan_of(name, info.dtype, experts)) is not None:
            watches.append(_Watch(info.offset, info.offset + info.nbytes, scan))
    return sorted(watches, key=lambda watch: watch.begin)


def _stream(
    path: Path, size: int, watches: list[_Watch], advance: Callable[[int], None], stop: threading.Event
) -> None:
    waiting, active, position = list(reversed(watches)), list[_Watch](), 0
    with DirectReader(path) as file:
        blocks = ((file, span) for span in spans_of(0, size, BLOCK_BYTES))
        for data in read_ahead(blocks, BLOCK_BYTES, READS_AHEAD):
            if stop.is_set():
                return
            end = position + len(data)
            while waiting and waiting[-1].begin < end:
                active.append(waiting.pop())
            for watch in active:
                watch.sink.feed(data[max(0, watch.begin - position) : watch.end - position])
            active = [watch for watch in active if watch.end > end]
            position = end
            advance(len(data))
