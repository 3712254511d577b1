"""The cache's bookkeeping: which experts are resident, in which slot, and how many bytes they take. Pure.

Moves no byte and writes no table. Every entry has a size; `size` is their exact sum and never exceeds `capacity`.
"""

from __future__ import annotations

from collections.abc import Callable

from services.expertd.policy import Key, Policy


class ExpertCache:
    """Resident experts under an eviction policy, within a budget of bytes."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        self.capacity = capacity
        self.size = 0
        self.hits = 0
        self.misses = 0
        self._policy = policy
        self._entries: dict[Key, tuple[int, int]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> int | None:
        """Look a key up: its slot and one more use, or None and a miss."""
        self.use(key, 1)
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def use(self, key: Key, count: int) -> None:
        """So many look-ups of a key; they were hits if it is resident, and it gains as many uses."""
        if key not in self._entries:
            self.misses += count
            return
        self.hits += count
        for _ in range(count):
            self._policy.touch(key)

    def put(self, key: Key, slot: int, nbytes: int, uses: int = 1) -> None:
        """A new entry. There must be room: `evict` first."""
        assert key not in self._entries, f"{key} is resident already"
        assert self.size + nbytes <= self.capacity, f"no room for {nbytes} bytes"
        self._entries[key] = (slot, nbytes)
        self.size += nbytes
        self._policy.insert(key, uses)

    def evict(
        self, nbytes: int, is_kept: Callable[[Key, int], bool] = lambda key, slot: False
    ) -> list[tuple[Key, int]]:
        """Give up entries, as the policy orders them, until at least `nbytes` are gone: their keys and slots.

        Those that `is_kept` are passed over; fewer bytes than asked are given up if nothing else is left.
        """
        chosen: list[tuple[Key, int]] = []
        freed = 0
        for key in self._policy.order():
            if freed >= nbytes:
                break
            slot, size = self._entries[key]
            if not is_kept(key, slot):
                chosen.append((key, slot))
                freed += size
        for key, _ in chosen:
            self._remove(key)
        return chosen

    @property
    def hit_rate(self) -> float:
        """Share of look-ups that found their expert; 0 before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0

    def uses(self) -> dict[Key, int]:
        """The policy's knowledge of every resident key: the heat."""
        return self._policy.uses()

    def _remove(self, key: Key) -> None:
        self.size -= self._entries.pop(key)[1]
        self._policy.remove(key)
