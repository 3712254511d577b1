"""Decides what is read next, into which slot, and who may go on: demand, the next wave, hints, guesses. Pure.

Owns residency: it alone writes the slot table, and only after the bytes are in the slot. No clock, disk or socket of
its own; not thread-safe. How a slot becomes reusable:

* by the worker's clock (services.expertd.slots), or
* at once, while the worker stands still in a look-up: a request names what that look-up missed and which slots it
  holds, and until it is answered the worker touches no others but those of what it missed.

A few slots are kept free, so that what is read ahead need not wait for the clock either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

from services.expertd.cache import ExpertCache
from services.expertd.policy import Key
from services.expertd.slots import Slots, WorkerView

T = TypeVar("T")

# Hints that wait are at most one to so many slots: they come by the hundred, and must not flush a small cache.
HINT_SHARE = 4
# Loads in flight that nobody waits for, while a worker is there: its next miss shares the drive with no more. Two are
# enough to keep a drive busy with records of megabytes.
BACKGROUND = 2


class Urgency(IntEnum):
    """Queues, the most urgent first."""

    DEMAND = 0
    AHEAD = 1
    HINT = 2
    GUESS = 3
    WARM = 4


class SlotTable(Protocol):
    """What the worker sees."""

    def publish(self, key: Key, slot: int) -> None: ...

    def withdraw(self, key: Key) -> None: ...


@dataclass(slots=True, eq=False)
class Fetch(Generic[T]):
    """A request that waits for records. `token` is the caller's name for it."""

    token: T
    held: frozenset[int]  # slots
    missing: set[Key] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Load(Generic[T]):
    """A record on its way in; `slot` is -1 while it is queued, `uses` what is known of its use."""

    key: Key
    urgency: Urgency
    slot: int = -1
    uses: int = 0
    fetches: list[Fetch[T]] = field(default_factory=list)


@dataclass(slots=True)
class LoadCounters:
    """Cumulative."""

    misses: int = 0
    late_hits: int = 0
    prefetched: int = 0
    evictions: int = 0
    read_errors: int = 0


class Scheduler(Generic[T]):
    """Residency, and the loads that change it."""

    def __init__(
        self,
        cache: ExpertCache,
        slots: Slots,
        table: SlotTable,
        slot_bytes: int,
        reserve: int,
        look: Callable[[], WorkerView],
    ) -> None:
        self.counters = LoadCounters()
        self._cache = cache
        self._slots = slots
        self._table = table
        self._slot_bytes = slot_bytes
        self._reserve = reserve
        self._max_hints = max(1, slots.num_slots // HINT_SHARE)
        self._look = look
        self._loads: dict[Key, Load[T]] = {}
        self._queues: tuple[deque[Load[T]], ...] = tuple(deque() for _ in Urgency)
        self._pins: dict[Key, int] = {}
        self._standing: Fetch[T] | None = None  # the look-up in which the worker stands still

    def queued(self, urgency: Urgency) -> int:
        return len(self._queues[urgency])

    @property
    def unfinished(self) -> int:
        """Loads, queued or in flight."""
        return len(self._loads)

    @property
    def in_flight(self) -> int:
        """Loads that have a slot."""
        return len(self._loads) - sum(map(len, self._queues))

    def fetch(
        self, token: T, layer: int, expert_ids: Iterable[int], held_slots: Iterable[int], clock: int, is_ahead: bool
    ) -> bool:
        """Take in a request; whether it is answered already, because everything is resident by now."""
        fetch, keys = Fetch(token, frozenset(held_slots)), [Key(layer, e) for e in expert_ids]
        now = self._look().clock
        if not is_ahead and clock < now:  # a GPU found it all, read for others, and went on before this came
            self.counters.late_hits += len(keys)
            return True
        self._unpin(everything=not is_ahead)
        clock = min(clock, now + 1)  # nobody looks further ahead, and pins must end
        for key in keys:
            self._pins[key] = max(clock, self._pins.get(key, clock))
            if self._is_missing(key, is_ahead):
                fetch.missing.add(key)
                urgency = Urgency.AHEAD if is_ahead else Urgency.DEMAND
                load = self._want(key, urgency)
                load.fetches.append(fetch)
                load.uses = max(load.uses, not is_ahead)
        if not is_ahead and fetch.missing:
            self._standing = fetch
        return not fetch.missing

    def hint(self, layer: int, expert_ids: Iterable[int], is_guess: bool = False) -> None:
        """Read these too, when nothing else is to be read; no more than would change a part of the cache.

        A guess is about the layer that comes next: what is left of the one before is out of date.
        """
        urgency = Urgency.GUESS if is_guess else Urgency.HINT
        if is_guess:
            self._forget_queued(Urgency.GUESS)
        for key in (Key(layer, e) for e in expert_ids):
            if self.queued(urgency) < self._max_hints and not self._is_there(key, uses=0):
                self._want(key, urgency)

    def warm(self, key: Key, uses: int) -> None:
        """Read this while nobody asks for anything, and know of so many uses."""
        self._want(key, Urgency.WARM).uses = uses

    def next(self) -> Load[T] | None:
        """The load to start now, with its slot; None if there is none, or no slot can be had yet."""
        self._slots.reclaim(self._look())
        self._replenish()
        queue = self._first_queue()
        if queue is None or (slot := self._find_slot()) is None:
            return None  # what is less urgent must not take the slot that this one waits for
        load = queue.popleft()
        load.slot = slot
        return load

    @property
    def has_next(self) -> bool:
        """Whether a load may start, as soon as a slot can be had."""
        return self._first_queue() is not None

    def finish(self, load: Load[T], is_read: bool) -> list[T]:
        """The read has ended: publish it or give the slot back. Tokens of the requests that end with it."""
        del self._loads[load.key]
        if not is_read:
            self.counters.read_errors += 1
            self._slots.free(load.slot)
            self._drop(load.fetches)
            return [fetch.token for fetch in load.fetches]
        self._cache.put(load.key, load.slot, self._slot_bytes, load.uses)
        self._table.publish(load.key, load.slot)
        self.counters.prefetched += load.urgency in (Urgency.AHEAD, Urgency.HINT, Urgency.GUESS)
        ended = []
        for fetch in load.fetches:
            fetch.missing.remove(load.key)
            if not fetch.missing:
                ended.append(fetch.token)
                self._forget_standing(fetch)
        return ended

    def worker_lost(self) -> list[T]:
        """Nothing is pinned and nothing wanted any more; what is in flight ends as an ordinary resident.

        Tokens of the requests that end with it.
        """
        self._standing = None
        self._pins.clear()
        ended = {fetch: None for load in self._loads.values() for fetch in load.fetches}
        for load in self._loads.values():
            load.fetches.clear()
        for urgency in Urgency:
            self._forget_queued(urgency)
        return [fetch.token for fetch in ended]

    def _is_missing(self, key: Key, is_ahead: bool) -> bool:
        """Counts what a look-up found: ahead of time nothing is a miss or a late hit yet.

        The policy is not told: it learns of every use from the worker's counts.
        """
        is_missing = not self._is_there(key, uses=not is_ahead)
        if is_ahead:
            return is_missing
        load = self._loads.get(key)
        if not is_missing or (load is not None and load.slot >= 0 and load.urgency is not Urgency.DEMAND):
            self.counters.late_hits += 1
        else:
            self.counters.misses += 1
        return is_missing

    def _is_there(self, key: Key, uses: int) -> bool:
        """Resident, or so again, with so many uses: what was given up is whole until its slot is free.

        Reading it anew would be a waste, and wrong: a GPU takes what it misses as soon as the table has it, and may use
        that very slot, which its request did not yet name as held.
        """
        if key in self._cache:
            return True
        slot = self._slots.revive(key)
        if slot is None:
            return False
        self._cache.put(key, slot, self._slot_bytes, uses)
        self._table.publish(key, slot)
        return True

    def _want(self, key: Key, urgency: Urgency) -> Load[T]:
        """The load of this key, new or joined, at least this urgent."""
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = Load(key, urgency)
            self._queues[urgency].append(load)
        elif urgency < load.urgency and load.slot < 0:
            self._queues[load.urgency].remove(load)
            load.urgency = urgency
            self._queues[urgency].append(load)
        return load

    def _forget_queued(self, urgency: Urgency) -> None:
        for load in self._queues[urgency]:
            del self._loads[load.key]
        self._queues[urgency].clear()

    def _first_queue(self) -> deque[Load[T]] | None:
        """The most urgent one that has a load, unless that must wait for what is in flight."""
        for urgency, queue in enumerate(self._queues):
            if queue:
                return queue if urgency <= Urgency.AHEAD or self._has_room_behind() else None
        return None

    def _has_room_behind(self) -> bool:
        """Whether one more load may start that nobody waits for.

        Not beside one that is waited for, even if it is certain to be: two that share the drive both end when the later
        one would have, and the worker could have computed from when the earlier one would have.
        """
        if any(load.fetches for load in self._loads.values()):
            return False
        return self.in_flight < BACKGROUND or not self._look().is_attached

    def _find_slot(self) -> int | None:
        if self._standing is not None:
            self._slots.reclaim_all_but(self._standing.held)
        slot = self._slots.take()
        if slot is not None:
            return slot
        if self._standing is not None:
            for _, victim in self._evict():
                return victim
            return None
        # One retirement for each load that waits: more would shrink the cache for nothing.
        if self._slots.num_retired < sum(map(len, self._queues)):
            for key, victim in self._evict():
                self._slots.retire(victim, key, self._look())
        self._slots.reclaim(self._look())
        return self._slots.take()

    def _replenish(self) -> None:
        """Retire ahead of need."""
        while self._slots.num_free + self._slots.num_retired < self._reserve and (victims := self._evict()):
            for key, victim in victims:
                self._slots.retire(victim, key, self._look())

    def _evict(self) -> list[tuple[Key, int]]:
        clock = self._look().clock
        standing = self._standing

        def is_kept(key: Key, slot: int) -> bool:
            return self._pins.get(key, -1) >= clock or (standing is not None and slot in standing.held)

        victims = self._cache.evict(self._slot_bytes, is_kept)
        for key, _ in victims:
            self._table.withdraw(key)
        self.counters.evictions += len(victims)
        return victims

    def _unpin(self, everything: bool) -> None:
        """A look-up of now ends every older wish, those of look-ups that failed included."""
        clock = self._look().clock
        if everything:
            self._pins.clear()
        elif any(pin < clock for pin in self._pins.values()):
            self._pins = {key: pin for key, pin in self._pins.items() if pin >= clock}

    def _drop(self, fetches: list[Fetch[T]]) -> None:
        """These requests end unfulfilled; their other loads go on without them."""
        for fetch in fetches:
            self._forget_standing(fetch)
            for key in fetch.missing:
                if (load := self._loads.get(key)) is not None:
                    load.fetches.remove(fetch)

    def _forget_standing(self, fetch: Fetch[T]) -> None:
        if self._standing is fetch:
            self._standing = None
