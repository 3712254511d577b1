"""Kept segments on a disk: a file each, written by a thread of its own, read when a prompt asks for it.

A file appears whole or not at all, and carries a checksum; nothing is synced, because after a power cut the checksum
tells. What is in the directory and not ours is left alone. Slow or full disks cost reuse after a restart, nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from services.worker.sessions.path_budget import Key, PathBudget
from services.worker.sessions.segment import DamagedSegment, KeptSegment
from shared.errors import ConfigError
from shared.runtime.rundir import hold_lock

log = logging.getLogger(__name__)

SUFFIX, DRAFT_SUFFIX = ".session.safetensors", ".session.tmp"
_OURS = re.compile(rf"([0-9a-f]{{64}})({re.escape(SUFFIX)}|{re.escape(DRAFT_SUFFIX)})")
LOCK_NAME = "lock"
# Segments that wait for the disk, each held in memory meanwhile; what comes on top is not written.
MAX_WAITING = 32
CLOSE_S = 1.0


@dataclass(slots=True)
class DiskCounters:
    """Cumulative over the life of the worker, in segments; `skipped` found too many waiting before them."""

    session_disk_writes: int = 0
    session_disk_reads: int = 0
    session_disk_skipped: int = 0
    session_disk_errors: int = 0


class SessionDisk:
    """The files of one directory, at most `limit` bytes besides what is being written. One worker at a time has it."""

    def __init__(self, directory: Path, limit: int) -> None:
        """Raises ConfigError if the directory cannot be used, LockedError if another worker uses it."""
        self._directory = directory
        self._counters = DiskCounters()
        self._budget = PathBudget(limit)
        # Files that must go and are not counted in the budget; one that cannot be removed stays here until it can.
        self._doomed: set[Path] = set()
        # Guards these two: the computing thread reads files, the writer makes and removes them.
        self._lock = threading.Lock()
        # A path that was used, with the segment that ends it if that is new; None is the end.
        self._waiting: queue.Queue[tuple[Sequence[Key], KeptSegment | None] | None] = queue.Queue(MAX_WAITING)
        self._complaint = ""
        busy = f"a worker already keeps sessions in {directory}"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_file = hold_lock(directory / LOCK_NAME, busy, "set another worker.session_dir")
            self._scan()
        except OSError as error:
            raise ConfigError(f"worker.session_dir = {directory} cannot be used: {error.strerror}") from error
        self._writer = threading.Thread(target=self._run, name="sessions to disk", daemon=True)
        self._writer.start()

    def load(self, key: Key) -> KeptSegment | None:
        """The segment of this key; None if there is none that can be read. A damaged file goes with the next write."""
        with self._lock:
            if key not in self._budget:
                return None
        path = self._path(key)
        try:
            segment = KeptSegment.decode(key, path.read_bytes())
        except (OSError, DamagedSegment) as error:
            log.warning("kept session not used file=%s error=%s", path, error)
            self._counters.session_disk_errors += 1
            self._remove(key)
            return None
        self._counters.session_disk_reads += 1
        return segment

    def save(self, path: Sequence[Key], segment: KeptSegment) -> None:
        """Write the segment that ends this path, soon; returns at once."""
        self._enqueue(path, segment)

    def use(self, path: Sequence[Key]) -> None:
        """A sequence went this way: the files are recent again, after a restart too."""
        if path:
            self._enqueue(path, None)

    def stats(self) -> dict[str, float]:
        """Counters and gauges, for any thread."""
        return asdict(self._counters) | {"session_disk_bytes": self._budget.nbytes}

    def close(self) -> None:
        """Give the writer `CLOSE_S` for what waits. Then it goes with the process; what it has not finished is lost."""
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._writer.join(max(0.0, deadline - time.monotonic()))
        if not self._writer.is_alive():
            os.close(self._lock_file)

    def _scan(self) -> None:
        """Take in the files that are there, oldest use first, and remove what a killed worker left half-written."""
        found = []
        strangers = 0
        for entry in os.scandir(self._directory):
            match = _OURS.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                strangers += entry.name != LOCK_NAME
            elif match[2] == DRAFT_SUFFIX:
                self._doomed.add(Path(entry.path))
            else:
                status = entry.stat()
                found.append((status.st_mtime_ns, bytes.fromhex(match[1]), status.st_size))
        if strangers:
            log.warning("left alone in the session directory dir=%s files=%d", self._directory, strangers)
        for _, key, size in sorted(found):
            evicted = self._budget.add([key], size)
            self._doomed.update(map(self._path, [key] if evicted is None else evicted))
        self._sweep()

    def _enqueue(self, path: Sequence[Key], segment: KeptSegment | None) -> None:
        try:
            self._waiting.put_nowait((path, segment))
        except queue.Full:
            self._counters.session_disk_skipped += segment is not None

    def _run(self) -> None:
        while (used := self._waiting.get()) is not None:
            path, segment = used
            try:
                if segment is not None:
                    self._write(path, segment)
                self._touch(path)
            except OSError as error:
                self._counters.session_disk_errors += 1
                self._complain(f"{error.strerror} ({self._directory})")

    def _write(self, path: Sequence[Key], segment: KeptSegment) -> None:
        key = path[-1]
        if key in self._budget:
            return
        self._sweep()  # no more files while one that must go cannot
        data, file, draft = segment.encode(key), self._path(key), self._path(key, DRAFT_SUFFIX)
        try:
            draft.write_bytes(data)
            with self._lock:  # whoever sees the key sees the file
                evicted = self._budget.add(path, len(data))
                if evicted is not None:
                    self._doomed.update(map(self._path, evicted))  # they are not counted, even if the rename fails
                    draft.rename(file)
                    self._doomed.discard(file)
            self._counters.session_disk_writes += evicted is not None
        except OSError:
            self._remove(key)
            raise
        finally:
            with self._lock:
                self._doomed.add(draft)
            self._sweep()

    def _sweep(self) -> None:
        """Remove the doomed files, each whatever becomes of the others. Raises OSError if one is left."""
        with self._lock:
            doomed = tuple(self._doomed)
        failure = None
        for path in doomed:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failure = error
            else:
                with self._lock:
                    self._doomed.discard(path)
        if failure is not None:
            raise failure

    def _touch(self, path: Sequence[Key]) -> None:
        """Times in the order of the budget: after a restart it is read from them."""
        with self._lock:
            self._budget.use(path)
        for key in reversed(path):
            if key in self._budget:
                now = time.time_ns()
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._path(key), ns=(now, now))

    def _remove(self, key: Key) -> None:
        with self._lock:
            self._budget.remove(key)
            self._doomed.add(self._path(key))

    def _path(self, key: Key, suffix: str = SUFFIX) -> Path:
        return self._directory / f"{key.hex()}{suffix}"

    def _complain(self, what: str) -> None:
        """Once for each kind of trouble: a full disk would fill the log as well."""
        if what != self._complaint:
            log.warning("sessions not kept on disk error=%s", what)
        self._complaint = what
