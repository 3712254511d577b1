"""Which of the kept segments stay, within a budget of bytes. Pure; knows keys and sizes only.

A segment's key stands for all tokens up to its end, so keys form paths from a root, and a key is useful only while all
before it on its path are kept. Keys are ordered by their last use, those of one path from its end to its root: so the
oldest key ends every path that it is on, and can be dropped alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

Key = bytes


class PathBudget:
    """`nbytes` is the sum of the sizes of the keys held, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._sizes: OrderedDict[Key, int] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Key]:
        """Oldest first."""
        return iter(self._sizes)

    def use(self, path: Sequence[Key]) -> None:
        """A sequence went this way, root first; keys that are not held are passed over."""
        for key in reversed(path):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def add(self, path: Sequence[Key], nbytes: int) -> list[Key] | None:
        """Take in the last key of a path; returns the keys given up for it, or None if it does not fit.

        It does not fit if there would be no room for it beside the keys before it on its path.
        """
        *before, key = path
        assert key not in self._sizes, "this key is held already"
        if sum(self._sizes.get(k, 0) for k in before) + nbytes > self.limit:
            return None
        self._sizes[key] = nbytes
        self.nbytes += nbytes
        self.use(path)
        evicted = []
        while self.nbytes > self.limit:
            oldest, size = self._sizes.popitem(last=False)
            self.nbytes -= size
            evicted.append(oldest)
        return evicted

    def remove(self, key: Key) -> None:
        self.nbytes -= self._sizes.pop(key, 0)
