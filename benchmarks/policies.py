"""What eviction policies and prefetch make of recorded routes: hit rates of the cache at several sizes.

`python -m benchmarks.policies [TRACE]`. Replays the demo's 50 conversations (demo/routes.py) without a clock: what is
prefetched has arrived when it is looked up, so these are the rates of a disk that keeps up. Those policies that
expertd has are its own classes. Belady's, which knows the future, is the bound for what is read on demand only.
"""

from __future__ import annotations

import argparse
import bisect
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import save
from services.expertd.policy import POLICIES, Key, Policy

TRACE = Path(__file__).parent.parent / "tests" / "data" / "demo-routes.npz"
SHARES = (0.3, 0.4, 0.5, 0.6)
HASH_LAYERS = 3
NO_GUESS = 255


@dataclass(frozen=True, slots=True)
class LookUp:
    """Experts of one layer that are used together. `hinted` and `guessed` are asked for right after it."""

    keys: tuple[Key, ...]
    hinted: tuple[Key, ...] = ()
    guessed: tuple[Key, ...] = ()


def look_ups(trace: Path) -> list[LookUp]:
    """The trace as the engine looks it up: a whole prompt layer by layer, then token by token."""
    data = np.load(trace)
    experts, guesses = data["experts"], data["guesses"]
    steps: list[LookUp] = []
    bounds = zip(data["conversation"].tolist(), data["decoded"].tolist(), strict=True)
    for (_, decoded), rows in groupby(range(len(experts)), key=dict(enumerate(bounds)).__getitem__):
        tokens = list(rows)
        for taken in [[token] for token in tokens] if decoded else [tokens]:
            steps += _step(experts[taken], guesses[taken])
    return steps


def _step(experts: np.ndarray, guesses: np.ndarray) -> Iterator[LookUp]:
    layers = [tuple(Key(layer, e) for e in np.unique(experts[:, layer]).tolist()) for layer in range(experts.shape[1])]
    for layer, keys in enumerate(layers):
        guessed: tuple[Key, ...] = ()
        if len(experts) == 1 and layer + 1 < len(layers):
            guessed = tuple(Key(layer + 1, e) for e in guesses[0, layer + 1].tolist() if e != NO_GUESS)
        hinted = tuple(chain(*layers[1:HASH_LAYERS])) if layer == 0 else ()
        yield LookUp(keys, hinted, guessed)


class Evictor(Protocol):
    """What a replay asks of a policy."""

    def insert(self, key: Key, uses: int) -> None: ...

    def touch(self, key: Key) -> None: ...

    def evict(self, kept: Collection[Key]) -> Key:
        """Give one up that is not kept."""


class Ordered:
    """A policy of expertd."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.insert, self.touch = policy.insert, policy.touch

    def evict(self, kept: Collection[Key]) -> Key:
        victim = next(key for key in self._policy.order() if key not in kept)
        self._policy.remove(victim)
        return victim


class RandomOfTheOldest:
    """Any of the quarter that was not used for longest."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()
        self._random = random.Random(0)

    def insert(self, key: Key, uses: int) -> None:
        self._keys[key] = None

    def touch(self, key: Key) -> None:
        self._keys.move_to_end(key)

    def evict(self, kept: Collection[Key]) -> Key:
        free = [key for key in self._keys if key not in kept]
        victim = self._random.choice(free[: max(1, len(free) // 4)])
        del self._keys[victim]
        return victim


class S3Fifo:
    """A small queue for new keys, a main one with second chances, and a memory of those that left the small one.

    Source: Yang, Zhang, Qiu, Yue, Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023).
    """

    SMALL = 0.1

    def __init__(self) -> None:
        self._small: deque[Key] = deque()
        self._main: deque[Key] = deque()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._uses: dict[Key, int] = {}

    def insert(self, key: Key, uses: int) -> None:
        self._uses[key] = 0
        (self._main if key in self._ghosts else self._small).append(key)
        self._ghosts.pop(key, None)

    def touch(self, key: Key) -> None:
        self._uses[key] = min(3, self._uses[key] + 1)

    def evict(self, kept: Collection[Key]) -> Key:
        while True:
            is_small = len(self._small) >= self.SMALL * len(self._uses) or not self._main
            queue = self._small if is_small else self._main
            key = queue.popleft()
            if key in kept:
                queue.append(key)
                if not (set(queue) - set(kept)):  # nothing else in this one: promote it
                    self._main.extend(self._small)
                    self._small.clear()
            elif is_small and self._uses[key] > 1:
                self._main.append(key)
            elif not is_small and self._uses[key] > 0:
                self._uses[key] -= 1
                self._main.append(key)
            else:
                break
        del self._uses[key]
        if is_small:
            self._ghosts[key] = None
            while len(self._ghosts) > len(self._uses):
                self._ghosts.popitem(last=False)
        return key


class WTinyLfu:
    """A window for new keys before a segmented LRU; who stays is decided by counts that fade.

    Counts are exact where the original has a sketch. Source: Einziger, Friedman, Manes, "TinyLFU: a highly efficient
    cache admission policy" (ACM Transactions on Storage, 2017).
    """

    WINDOW, PROTECTED = 0.1, 0.8
    SAMPLE = 10  # uses for each key between two halvings

    def __init__(self) -> None:
        self._window: OrderedDict[Key, None] = OrderedDict()
        self._probation: OrderedDict[Key, None] = OrderedDict()
        self._protected: OrderedDict[Key, None] = OrderedDict()
        self._counts: Counter[Key] = Counter()
        self._uses = 0

    def __len__(self) -> int:
        return len(self._window) + len(self._probation) + len(self._protected)

    def insert(self, key: Key, uses: int) -> None:
        self._window[key] = None
        self._count(key, uses)
        while len(self._window) > self._room():  # the cache is not full yet
            self._probation[self._window.popitem(last=False)[0]] = None

    def touch(self, key: Key) -> None:
        self._count(key, 1)
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        else:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self.PROTECTED * (len(self._probation) + len(self._protected)):
                self._probation[self._protected.popitem(last=False)[0]] = None

    def evict(self, kept: Collection[Key]) -> Key:
        candidate = next((key for key in self._window if key not in kept), None)
        victim = next((key for key in chain(self._probation, self._protected) if key not in kept), None)
        if (
            candidate
            and victim
            and len(self._window) >= self._room()
            and self._counts[candidate] > self._counts[victim]
        ):
            del self._window[candidate]
            self._probation[candidate] = None
            candidate = None
        if victim is None or (candidate and len(self._window) >= self._room()):
            victim = candidate
        assert victim is not None
        for segment in (self._window, self._probation, self._protected):
            segment.pop(victim, None)
        return victim

    def _room(self) -> int:
        return max(1, int(self.WINDOW * len(self)))

    def _count(self, key: Key, uses: int) -> None:
        self._counts[key] += uses
        self._uses += uses
        if self._uses >= self.SAMPLE * len(self):
            self._uses = 0
            self._counts = Counter({key: count // 2 for key, count in self._counts.items()})


class Belady:
    """Gives up what is used again last; `time` is the number of the look-up.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal, 1966).
    """

    def __init__(self, future: Sequence[LookUp]) -> None:
        self._uses: dict[Key, list[int]] = {}
        self._keys: set[Key] = set()
        self.time = 0
        for time, look_up in enumerate(future):
            for key in look_up.keys:
                self._uses.setdefault(key, []).append(time)

    def insert(self, key: Key, uses: int) -> None:
        self._keys.add(key)

    def touch(self, key: Key) -> None:
        """Its uses are known."""

    def evict(self, kept: Collection[Key]) -> Key:
        victim = max(sorted(self._keys.difference(kept)), key=self._next_use)
        self._keys.remove(victim)
        return victim

    def _next_use(self, key: Key) -> float:
        uses = self._uses.get(key, [])
        place = bisect.bisect_right(uses, self.time)
        return uses[place] if place < len(uses) else float("inf")


def _ordered(name: str) -> Callable[[Sequence[LookUp]], Evictor]:
    return lambda _: Ordered(POLICIES[name]())


MAKERS: dict[str, Callable[[Sequence[LookUp]], Evictor]] = {
    **{name: _ordered(name) for name in POLICIES},
    "random of the oldest": lambda _: RandomOfTheOldest(),
    "s3-fifo": lambda _: S3Fifo(),
    "w-tinylfu": lambda _: WTinyLfu(),
    "belady": Belady,
}

PREFETCHES: dict[str, Callable[[LookUp], Sequence[Key]]] = {
    "on demand": lambda look_up: (),
    "hash layers": lambda look_up: look_up.hinted,
    "hash layers and guesses": lambda look_up: look_up.hinted + look_up.guessed,
}


def hit_rate(
    steps: Sequence[LookUp], evictor: Evictor, capacity: int, prefetch: Callable[[LookUp], Sequence[Key]]
) -> float:
    """Share of the experts looked up that were resident."""
    resident: set[Key] = set()
    hits = uses = 0

    def admit(key: Key, known_uses: int, kept: Collection[Key]) -> None:
        if len(resident) == capacity:
            resident.remove(evictor.evict(kept))
        evictor.insert(key, known_uses)
        resident.add(key)

    for time, step in enumerate(steps):
        if isinstance(evictor, Belady):
            evictor.time = time
        hits += len(resident.intersection(step.keys))
        uses += len(step.keys)
        for key in step.keys:
            if key in resident:
                evictor.touch(key)
            else:
                admit(key, 1, step.keys)
        for key in prefetch(step)[: capacity // 4]:
            if key not in resident:
                admit(key, 0, step.keys)
    return hits / uses


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=TRACE)
    arguments = parser.parse_args()
    steps = look_ups(arguments.trace)
    experts = len({key for step in steps for key in step.keys})
    figures = {
        prefetch: {
            policy: {
                f"{share:.0%}": round(hit_rate(steps, make(steps), round(share * experts), PREFETCHES[prefetch]), 3)
                for share in SHARES
            }
            for policy, make in MAKERS.items()
        }
        for prefetch in PREFETCHES
    }
    console = Console()
    for prefetch, rates in figures.items():
        table = Table("policy", *(f"{share:.0%} resident" for share in SHARES), title=f"Hit rates, {prefetch}")
        for policy, row in rates.items():
            table.add_row(policy, *(f"{rate:.1%}" for rate in row.values()))
        console.print(table)
    print(save("policies", {"trace": arguments.trace.name, "experts": experts, "hit_rates": figures}))


if __name__ == "__main__":
    main()
