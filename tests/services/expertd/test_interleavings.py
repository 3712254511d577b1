"""The slot protocol under every order of events that a seed can think of: no look-up ever sees another expert's bytes.

A simulated worker follows the worker's rules, step by step; between any two of its steps the scheduler, the disk, the
sockets and the memory system may move. Stores of one side become visible to the other late and in any order, but within
STORE_DELAY_S, of which a look-up takes at least two; a message carries everything that was stored before it.
"""

import random
from collections import deque
from collections.abc import Iterator

import pytest

from services.expertd import slots as slots_module
from services.expertd.cache import ExpertCache
from services.expertd.policy import POLICIES, Key
from services.expertd.scheduler import Load, Scheduler
from services.expertd.slots import IDLE_GRACE_S, Slots, WorkerView

LAYERS, EXPERTS, SLOT_BYTES = 3, 6, 10
MOVES = 600
STORE_DELAY_S = IDLE_GRACE_S / 2


class Store:
    """A store on its way to the other side: variable, value, and when it was made."""

    def __init__(self, name: object, value: int, now: float) -> None:
        self.name, self.value, self.now = name, value, now


class World:
    """Memory, sockets and disk between one scheduler and one worker."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_slots = rng.randint(4, 9)
        self.wave = self.num_slots // 2
        self.now = 0.0
        self.attached = True
        self.clock = 0  # as the worker knows it
        self.seen_by_expertd = {"clock": 0, "busy": 0}
        self.seen_by_worker: dict[Key, int] = {}
        self.to_expertd: list[Store] = []
        self.to_worker: list[Store] = []
        self.memory: list[Key | None] = [None] * self.num_slots
        self.inbox: deque[tuple] = deque()  # what the worker has sent
        self.outcomes: dict[int, bool] = {}  # token -> whether it was fulfilled
        self.loads: list[Load[int]] = []
        self.cache = ExpertCache(self.num_slots * SLOT_BYTES, POLICIES[rng.choice(sorted(POLICIES))]())
        self.slots = Slots(self.num_slots)
        self.scheduler: Scheduler[int] = Scheduler(
            self.cache, self.slots, self, SLOT_BYTES, rng.randint(0, 2), self.look
        )
        self.steps_done = 0

    # --- expertd's side --------------------------------------------------------------------------------------------

    def look(self) -> WorkerView:
        seen = self.seen_by_expertd
        return WorkerView(seen["clock"], bool(seen["busy"]), self.attached, self.now)

    def publish(self, key: Key, slot: int) -> None:
        assert self.memory[slot] == key, "published before its bytes are there"
        self.to_worker.append(Store(key, slot, self.now))

    def withdraw(self, key: Key) -> None:
        self.to_worker.append(Store(key, -1, self.now))

    def deliver(self) -> None:
        """The next message reaches expertd, and with it every store made before it was sent."""
        if self.inbox:
            kind, stores, *message = self.inbox.popleft()
            self._arrive(self.to_expertd, self.seen_by_expertd, [s for s in self.to_expertd if s in stores])
            if kind == "hint":
                self.scheduler.hint(*message)
            elif self.scheduler.fetch(*message):
                self.answer(message[0], True)

    def start_load(self) -> None:
        load = self.scheduler.next()
        if load is not None:
            self.memory[load.slot] = None  # half written from now on
            self.loads.append(load)

    def finish_load(self) -> None:
        if self.loads:
            load = self.loads.pop(self.rng.randrange(len(self.loads)))
            is_read = self.rng.random() > 0.05
            self.memory[load.slot] = load.key if is_read else None
            for token in self.scheduler.finish(load, is_read):
                self.answer(token, is_read)

    def answer(self, token: int, is_fulfilled: bool) -> None:
        """A reply carries every store of expertd before it."""
        self._arrive(self.to_worker, self.seen_by_worker, list(self.to_worker))
        self.outcomes[token] = is_fulfilled

    # --- the worker's side -----------------------------------------------------------------------------------------

    def store(self, name: str, value: int) -> None:
        self.to_expertd.append(Store(name, value, self.now))

    def tick(self) -> None:
        self.pass_time(2 * STORE_DELAY_S)  # a look-up takes far longer than a store
        self.clock += 1
        self.store("clock", self.clock)

    def send(self, kind: str, *message: object) -> None:
        self.inbox.append((kind, list(self.to_expertd), *message))

    def die(self) -> None:
        """SIGKILL: what it stored is in memory, what it sent is lost, and expertd's socket notices."""
        self._arrive(self.to_expertd, self.seen_by_expertd, list(self.to_expertd))
        self.inbox.clear()
        self.attached = False
        self.scheduler.worker_lost()

    def attach(self) -> None:
        """A new worker maps the pool: the exchange of messages carries all stores."""
        self._arrive(self.to_worker, self.seen_by_worker, list(self.to_worker))
        self.attached = True
        self.clock = self.seen_by_expertd["clock"]
        self.store("busy", 0)

    # --- the memory system -----------------------------------------------------------------------------------------

    def flush_some(self) -> None:
        for stores, seen in ((self.to_expertd, self.seen_by_expertd), (self.to_worker, self.seen_by_worker)):
            names = list({s.name for s in stores})
            if names:
                name = self.rng.choice(names)  # variables arrive in any order, the values of one in theirs
                self._arrive(stores, seen, [next(s for s in stores if s.name == name)])

    def pass_some_time(self) -> None:
        self.pass_time(self.rng.choice((STORE_DELAY_S / 4, STORE_DELAY_S)))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for stores, seen in ((self.to_expertd, self.seen_by_expertd), (self.to_worker, self.seen_by_worker)):
            self._arrive(stores, seen, [s for s in stores if s.now <= self.now - STORE_DELAY_S])

    @staticmethod
    def _arrive(stores: list[Store], seen: dict, arriving: list[Store]) -> None:
        for store in arriving:
            stores.remove(store)
            seen[store.name] = store.value

    # --- invariants ------------------------------------------------------------------------------------------------

    def check_slots(self) -> None:
        total = self.slots.num_free + self.slots.num_retired + len(self.cache) + len(self.loads)
        assert total == self.num_slots, "a slot was lost or is used twice"
        assert self.cache.size == len(self.cache) * SLOT_BYTES <= self.cache.capacity
        assert self.scheduler.in_flight == len(self.loads)

    def check_held(self, held: dict[Key, int]) -> None:
        for key, slot in held.items():
            assert self.memory[slot] == key, f"{key} computes with {self.memory[slot]} in slot {slot}"


def worker(world: World, first_token: int) -> Iterator[None]:
    """One worker process: steps of a few look-ups each, at every yield the world may move."""
    rng, token = world.rng, first_token
    while True:
        world.store("busy", 1)
        yield
        waves = [(rng.randrange(LAYERS), rng.sample(range(EXPERTS), rng.randint(1, world.wave))) for _ in range(3)]
        for number, (layer, ids) in enumerate(waves):
            slots = {Key(layer, e): world.seen_by_worker.get(Key(layer, e), -1) for e in ids}
            held = {key: slot for key, slot in slots.items() if slot >= 0}
            missing = [key.expert for key, slot in slots.items() if slot < 0]
            if missing:
                token += 1
                world.send("fetch", token, layer, missing, list(held.values()), world.clock, False)
            if number + 1 < len(waves) and rng.random() < 0.5:
                next_layer, next_ids = waves[number + 1]
                absent = [e for e in next_ids if world.seen_by_worker.get(Key(next_layer, e), -1) < 0]
                world.send("fetch", -token, next_layer, absent, [], world.clock + 1, True)
            if rng.random() < 0.2:
                is_guess = rng.random() < 0.5
                world.send("hint", rng.randrange(LAYERS), rng.sample(range(EXPERTS), 2), is_guess)
            yield
            world.check_held(held)
            yield
            if missing:
                while token not in world.outcomes:
                    yield
                if not world.outcomes[token]:
                    break
                held |= {Key(layer, e): world.seen_by_worker[Key(layer, e)] for e in missing}
                assert min(held.values()) >= 0, "fetched, but not in the table"
            yield from compute(world, held)
        yield from rest(world)


def compute(world: World, held: dict[Key, int]) -> Iterator[None]:
    """The end of a look-up: everything is there."""
    world.check_held(held)
    yield
    world.check_held(held)
    world.tick()
    yield


def rest(world: World) -> Iterator[None]:
    """Between two steps."""
    world.store("busy", 0)
    world.steps_done += 1
    for _ in range(world.rng.randint(0, 5)):
        yield


def gpu_worker(world: World, first_token: int) -> Iterator[None]:
    """A worker whose GPU takes what it misses as soon as the table has it, for whomever it was read.

    The host passes the look-up on when it can, perhaps when the GPU has long gone on; no reply is waited for.
    """
    rng, token = world.rng, first_token
    while True:
        world.store("busy", 1)
        yield
        for _ in range(3):
            layer, ids = rng.randrange(LAYERS), rng.sample(range(EXPERTS), rng.randint(1, world.wave))
            slots = {Key(layer, e): world.seen_by_worker.get(Key(layer, e), -1) for e in ids}
            held = {key: slot for key, slot in slots.items() if slot >= 0}
            missing = [key for key in slots if key not in held]
            if missing:
                token += 1
                ids = [key.expert for key in missing]
                world.send("fetch", token, layer, ids, list(held.values()), world.clock, False)
            if rng.random() < 0.5:
                is_guess = rng.random() < 0.5
                hinted = layer if rng.random() < 0.5 else rng.randrange(LAYERS)
                world.send("hint", hinted, rng.sample(range(EXPERTS), 2), is_guess)
            yield
            while len(held) < len(slots) and world.outcomes.get(token, True):
                for key in missing:
                    slot = world.seen_by_worker.get(key, -1)
                    if slot >= 0 and key not in held:
                        held[key] = slot
                yield
                world.check_held(held)
            if len(held) < len(slots):
                break  # a read failed: the step is given up
            yield from compute(world, held)
        yield from rest(world)


WORKERS = {"cpu": worker, "gpu": gpu_worker}


def explore(seed: int, kind: str = "cpu") -> int:
    """Random moves, then a fair schedule until everything that was asked is answered. Steps that the worker made."""
    rng = random.Random(seed)
    world = World(rng)
    start = WORKERS[kind]
    process = start(world, 0)
    moves = [world.deliver, world.start_load, world.finish_load, world.flush_some, world.pass_some_time]
    weights = [rng.random() + 0.02 for _ in moves]
    for number in range(MOVES):
        if not world.attached:
            world.attach() if rng.random() < 0.1 else rng.choices(moves, weights)[0]()
        elif rng.random() < 0.003:
            world.die()
            process = start(world, (number + 1) * 1000)
        elif rng.random() < 0.4:
            next(process)
        else:
            rng.choices(moves, weights)[0]()
        world.check_slots()
    done, patience = world.steps_done, 0
    if not world.attached:
        world.attach()
    while world.steps_done < done + 3:
        next(process)
        for move in moves:
            move()
        patience += 1
        assert patience < 5000, "a wait does not end"
    return world.steps_done


def explore_many(count: int, first: int = 0, kind: str = "cpu") -> int:
    return min(explore(seed, kind) for seed in range(first, first + count))


@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("kind", WORKERS)
def test_no_look_up_ever_sees_foreign_bytes(block, kind):
    assert explore_many(300, block * 300, kind) >= 3


HASTY_RULES = {
    "one tick less": lambda r, w: w.clock > r.clock or (not w.is_busy and w.now >= r.time + IDLE_GRACE_S),
    "an idle worker is taken at its word": lambda r, w: w.clock > r.clock + 1 or not w.is_busy,
}


@pytest.mark.parametrize("rule", HASTY_RULES)
def test_the_exploration_finds_a_slot_reused_too_early(monkeypatch, rule):
    """The delay of the memory system is enough to break a rule that is short by one step."""

    def hasty(self, worker: WorkerView) -> bool:
        return not worker.is_attached or HASTY_RULES[rule](self, worker)

    monkeypatch.setattr(slots_module._Retired, "is_free", hasty)
    with pytest.raises(AssertionError, match="computes with"):
        explore_many(600, kind="gpu")


def test_the_exploration_finds_an_evicted_hit(monkeypatch):
    """Without the list of what the look-up holds, reuse during a miss would hit what it found."""
    monkeypatch.setattr(Scheduler, "_find_slot", _forgetful(Scheduler._find_slot))
    with pytest.raises(AssertionError, match="computes with"):
        explore_many(600)


def test_the_exploration_finds_a_slot_that_a_gpu_took_meanwhile(monkeypatch):
    """What was read for others and given up again may be what a GPU stands still with."""
    monkeypatch.setattr(slots_module.Slots, "revive", lambda self, key: None)
    with pytest.raises(AssertionError, match="computes with"):
        explore_many(600, kind="gpu")


def _forgetful(original):
    def find_slot(self):
        if self._standing is not None:
            self._standing.held = frozenset()
        return original(self)

    return find_slot
