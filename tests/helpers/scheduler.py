"""A scheduler of expertd's by itself, with a worker that is whatever a test says."""

from services.expertd.cache import ExpertCache
from services.expertd.policy import Key, Lru
from services.expertd.scheduler import Load, Scheduler
from services.expertd.slots import Slots, WorkerView

SLOT_BYTES = 10


class Bench:
    """A scheduler, the table that it writes, and a worker that is whatever the test says."""

    def __init__(self, num_slots: int, reserve: int = 0) -> None:
        self.table: dict[Key, int] = {}
        self.clock, self.busy, self.attached, self.now = 0, True, True, 0.0
        self.slots = Slots(num_slots)
        self.cache = ExpertCache(num_slots * SLOT_BYTES, Lru())
        self.scheduler: Scheduler[str] = Scheduler(self.cache, self.slots, self, SLOT_BYTES, reserve, self.look)

    def look(self) -> WorkerView:
        return WorkerView(self.clock, self.busy, self.attached, self.now)

    def publish(self, key: Key, slot: int) -> None:
        assert slot not in self.table.values()
        self.table[key] = slot

    def withdraw(self, key: Key) -> None:
        del self.table[key]

    def ask(self, token: str, layer: int, *ids: int, held: tuple[int, ...] = (), ahead: bool = False) -> bool:
        return self.scheduler.fetch(token, layer, ids, held, self.clock + ahead, ahead)

    def hint(self, layer: int, *ids: int) -> None:
        self.scheduler.hint(layer, ids)

    def guess(self, layer: int, *ids: int) -> None:
        self.scheduler.hint(layer, ids, is_guess=True)

    def wish(self, kind: str, layer: int, *ids: int) -> None:
        """What nobody waits for."""
        if kind == "warm":
            for expert in ids:
                if Key(layer, expert) not in self.cache:
                    self.scheduler.warm(Key(layer, expert), 1)
        else:
            self.scheduler.hint(layer, ids, is_guess=kind == "guess")

    def load_of(self, layer: int, expert: int) -> Load[str]:
        return self.scheduler._loads[Key(layer, expert)]

    def awaited(self) -> bool:
        return any(load.fetches for load in self.scheduler._loads.values())

    def start(self) -> tuple[int, int] | None:
        """Start the next load; its layer and expert."""
        self.load = self.scheduler.next()
        return None if self.load is None else (self.load.key.layer, self.load.key.expert)

    def run(self) -> list[tuple[int, int]]:
        """Start and finish loads until none can be started; what was read."""
        read = []
        while (key := self.start()) is not None:
            read.append(key)
            self.scheduler.finish(self.load, True)
        return read

    def fill(self, layer: int) -> None:
        """Every slot resident, the worker's look-ups done long ago."""
        for first in range(0, self.slots.num_slots, 2):
            self.ask("", layer, first, first + 1)
            self.run()
        self.clock += 3
