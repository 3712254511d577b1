"""Keeps the segments of recent prompts in memory, and on a disk if there is one to keep them on.

Owned by the thread that computes. Only whole segments come in, so whatever ends a request leaves nothing half-made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from services.worker.sessions.disk import SessionDisk
from services.worker.sessions.path_budget import Key, PathBudget
from services.worker.sessions.segment import KeptSegment, chain_keys


@dataclass(slots=True)
class SessionCounters:
    """Cumulative over the life of the worker: prompts of which something was kept, and segments that were dropped."""

    session_hits: int = 0
    session_evictions: int = 0


class SessionStore:
    """At most `limit` bytes in memory; 0 keeps nothing.

    `root` stands for all that the kept states depend on besides token ids: the checkpoint and what computes.
    """

    def __init__(self, limit: int = 0, root: Key = b"", disk: SessionDisk | None = None) -> None:
        self._root = root
        self._budget = PathBudget(limit)
        self._kept: dict[Key, KeptSegment] = {}
        self._disk = disk
        self._counters = SessionCounters()

    def follow(self, segments: Sequence[Sequence[int]]) -> Trail:
        """What is kept of a prompt cut into these segments, and where the rest of it goes."""
        if self._budget.limit == 0:
            return Trail(self, [], [])
        path = chain_keys(self._root, segments)
        kept: list[KeptSegment] = []
        for i in range(len(path)):
            segment = self._find(path[: i + 1])
            if segment is None:
                break
            kept.append(segment)
        self._budget.use(path[: len(kept)])
        self._counters.session_hits += bool(kept)
        if self._disk is not None:
            self._disk.use(path[: len(kept)])
        return Trail(self, path, kept)

    def keep(self, path: Sequence[Key], segment: KeptSegment) -> bool:
        """Keep the segment that ends this path, if it fits beside those before it; whether it did."""
        if not self._keep_in_memory(path, segment):
            return False
        if self._disk is not None:
            self._disk.save(path, segment)
        return True

    def stats(self) -> dict[str, float]:
        """Counters and gauges, for any thread."""
        gauges = {
            "session_bytes": self._budget.nbytes,
            "session_limit_bytes": self._budget.limit,
            "session_segments": len(self._budget),
        }
        return asdict(self._counters) | gauges | (self._disk.stats() if self._disk else {})

    def close(self) -> None:
        """Let the disk finish what it has begun."""
        if self._disk is not None:
            self._disk.close()

    def _find(self, path: Sequence[Key]) -> KeptSegment | None:
        kept = self._kept.get(path[-1])
        if kept is None and self._disk is not None:
            kept = self._disk.load(path[-1])
            if kept is not None and not self._keep_in_memory(path, kept):
                return None
        return kept

    def _keep_in_memory(self, path: Sequence[Key], segment: KeptSegment) -> bool:
        evicted = self._budget.add(path, segment.nbytes)
        if evicted is None:
            return False
        self._kept[path[-1]] = segment
        for key in evicted:
            del self._kept[key]
        self._counters.session_evictions += len(evicted)
        return True


class Trail:
    """One prompt's way through the store. `kept` are its first segments, as far as they were kept.

    `is_keeping` says whether the next segment would be: after one that did not fit, no other is useful.
    """

    def __init__(self, store: SessionStore, path: list[Key], kept: list[KeptSegment]) -> None:
        self.kept: Sequence[KeptSegment] = kept
        self.is_keeping = bool(path)
        self._store = store
        self._path = path
        self._length = len(kept)

    def add(self, segment: KeptSegment) -> None:
        """Keep the next segment, if it fits."""
        assert self.is_keeping, "nothing more of this prompt can be kept"
        self._length += 1
        self.is_keeping = self._store.keep(self._path[: self._length], segment)
