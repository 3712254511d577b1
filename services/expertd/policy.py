"""Which expert to give up: eviction orders, chosen by name. Pure; constant work a call, amortised.

A policy knows keys and their use, nothing of slots or bytes. `order` starts with the key it can spare best; the caller
skips those that are in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Key(NamedTuple):
    """An expert of a MoE layer."""

    layer: int
    expert: int


class Policy(Protocol):
    """An eviction order over the keys that were inserted and not removed."""

    def insert(self, key: Key, uses: int = 1) -> None:
        """A new key, with the uses that are known of it."""

    def touch(self, key: Key) -> None:
        """One more use."""

    def remove(self, key: Key) -> None: ...

    def order(self) -> Iterator[Key]:
        """Keys from the first to go on. The policy must not change while this is consumed."""

    def uses(self) -> dict[Key, int]:
        """What is known of the use of every key."""


class Lru:
    """Least recently used."""

    def __init__(self) -> None:
        self._uses: OrderedDict[Key, int] = OrderedDict()

    def insert(self, key: Key, uses: int = 1) -> None:
        self._uses[key] = uses

    def touch(self, key: Key) -> None:
        self._uses[key] += 1
        self._uses.move_to_end(key)

    def remove(self, key: Key) -> None:
        del self._uses[key]

    def order(self) -> Iterator[Key]:
        return iter(self._uses)

    def uses(self) -> dict[Key, int]:
        return dict(self._uses)


class _Bucket:
    """Keys of one frequency, oldest first, between the buckets of the next lower and higher one."""

    __slots__ = ("above", "below", "frequency", "keys")

    def __init__(self, frequency: int) -> None:
        self.frequency = frequency
        self.keys: dict[Key, None] = {}
        self.below: _Bucket = self
        self.above: _Bucket = self


class Lfu:
    """Least frequently used, the longest unused first among equals: a linked list of frequency buckets.

    Source: Shah, Mitra, Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme" (2010).
    """

    def __init__(self) -> None:
        self._root = _Bucket(0)  # the ring's ends meet here
        self._bucket_of: dict[Key, _Bucket] = {}

    def insert(self, key: Key, uses: int = 1) -> None:
        below = self._root
        while below.above is not self._root and below.above.frequency <= uses:
            below = below.above
        self._place(key, uses, below)

    def touch(self, key: Key) -> None:
        bucket = self._bucket_of[key]
        del bucket.keys[key]
        self._place(key, bucket.frequency + 1, bucket)
        self._drop_if_empty(bucket)

    def remove(self, key: Key) -> None:
        bucket = self._bucket_of.pop(key)
        del bucket.keys[key]
        self._drop_if_empty(bucket)

    def order(self) -> Iterator[Key]:
        bucket = self._root.above
        while bucket is not self._root:
            yield from bucket.keys
            bucket = bucket.above

    def uses(self) -> dict[Key, int]:
        return {key: bucket.frequency for key, bucket in self._bucket_of.items()}

    def halved(self) -> Lfu:
        """The same keys in the same order, with half the frequencies; in time proportional to their number."""
        half = Lfu()
        for key in self.order():
            half._place(key, self._bucket_of[key].frequency // 2, half._root.below)
        return half

    def _place(self, key: Key, frequency: int, below: _Bucket) -> None:
        """Into the bucket of this frequency, which is `below` or belongs just above it."""
        bucket = below if below.frequency == frequency and below is not self._root else below.above
        if bucket is self._root or bucket.frequency != frequency:
            bucket = _Bucket(frequency)
            bucket.below, bucket.above = below, below.above
            below.above.below = bucket
            below.above = bucket
        bucket.keys[key] = None
        self._bucket_of[key] = bucket

    def _drop_if_empty(self, bucket: _Bucket) -> None:
        if not bucket.keys:
            bucket.below.above, bucket.above.below = bucket.above, bucket.below


class AgedLfu:
    """LFU that forgets, behind a nursery where new keys are safe until newer ones come.

    Plain LFU collapses on a change of topic: yesterday's counts never fade, and a new key, used once, is the first
    to go. Here counts halve whenever there were `HALF_LIFE` uses for each key, hit or miss, and the newest eighth of
    the keys goes last.
    """

    NURSERY = 8
    HALF_LIFE = 6

    def __init__(self) -> None:
        self._old = Lfu()
        self._nursery: OrderedDict[Key, int] = OrderedDict()
        self._num_old = 0
        self._uses = 0  # since counts were halved

    def insert(self, key: Key, uses: int = 1) -> None:
        self._nursery[key] = uses
        if uses:
            self._count_use()
        while len(self._nursery) > max(1, (self._num_old + len(self._nursery)) // self.NURSERY):
            graduate, its_uses = self._nursery.popitem(last=False)
            self._old.insert(graduate, its_uses)
            self._num_old += 1

    def touch(self, key: Key) -> None:
        if key in self._nursery:
            self._nursery[key] += 1
        else:
            self._old.touch(key)
        self._count_use()

    def remove(self, key: Key) -> None:
        if self._nursery.pop(key, None) is None:
            self._old.remove(key)
            self._num_old -= 1

    def order(self) -> Iterator[Key]:
        yield from self._old.order()
        yield from self._nursery

    def uses(self) -> dict[Key, int]:
        return self._old.uses() | dict(self._nursery)

    def _count_use(self) -> None:
        self._uses += 1
        if self._uses >= self.HALF_LIFE * (self._num_old + len(self._nursery)):
            self._uses = 0
            self._old = self._old.halved()


POLICIES: dict[str, type[Lru] | type[Lfu] | type[AgedLfu]] = {"lru": Lru, "lfu": Lfu, "lfu-aged": AgedLfu}
