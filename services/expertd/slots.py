"""The life of a slot: free, loading, resident, retired, and free again when no reader can hold it. Pure.

A slot that its expert gives up may still be read: by a worker that looked it up before the table said -1. Its bytes are
whole meanwhile, and it may become resident again with the same expert. It is free when the worker's clock has gone past
the clock at retirement by two (one more than logic needs: stores arrive late), or when the worker was seen idle a while
after, or when there is no worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.expertd.policy import Key

# Twice the longest time that a store may take to be seen: once for our -1 to reach the worker, once for its `busy` to
# reach us. Store buffers drain in far less; this replaces the fences that Python does not have.
IDLE_GRACE_S = 0.001


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What expertd sees of the worker at a moment: its clock, and whether it is there and inside a step."""

    clock: int
    is_busy: bool
    is_attached: bool
    now: float


@dataclass(frozen=True, slots=True)
class _Retired:
    slot: int
    key: Key
    clock: int
    time: float

    def is_free(self, worker: WorkerView) -> bool:
        if not worker.is_attached or worker.clock > self.clock + 1:
            return True
        return not worker.is_busy and worker.now >= self.time + IDLE_GRACE_S


class Slots:
    """Who may write into which slot."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(range(num_slots))
        self._retired: deque[_Retired] = deque()
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_retired(self) -> int:
        return len(self._retired)

    def take(self) -> int | None:
        """A free slot, to be written; None if there is none."""
        return self._free.popleft() if self._free else None

    def free(self, slot: int) -> None:
        """Nobody reads this slot: it was never published, or its worker stands still elsewhere."""
        self._free.append(slot)

    def retire(self, slot: int, key: Key, worker: WorkerView) -> None:
        """The table says -1 for this key, which was in this slot; `worker` was seen after that."""
        self._retired.append(_Retired(slot, key, worker.clock, worker.now))

    def revive(self, key: Key) -> int | None:
        """The retired slot that still has this key's bytes, to be resident again; None if there is none."""
        for retired in self._retired:
            if retired.key == key:
                self._retired.remove(retired)
                return retired.slot
        return None

    def reclaim_all_but(self, held: frozenset[int]) -> None:
        """Free the retired slots outside `held`: the worker stands still and touches no others."""
        kept = deque(retired for retired in self._retired if retired.slot in held)
        self._free.extend(retired.slot for retired in self._retired if retired.slot not in held)
        self._retired = kept

    def reclaim(self, worker: WorkerView) -> None:
        """Free the retired slots that nobody can read any more. They retire in the order of the clock."""
        while self._retired and self._retired[0].is_free(worker):
            self._free.append(self._retired.popleft().slot)
