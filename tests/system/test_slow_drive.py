"""Beside a drive that is slow, what is read on a hint or a guess keeps nobody waiting for long, or is not read."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from helpers.expertd import TINY, Worker, served
from helpers.gpu import eventually
from helpers.services import Stack, write_config

from services.expertd.landing import SlotWriter
from services.expertd.reader import RecordReader
from services.expertd.reads import Reads
from services.expertd.scheduler import BACKGROUND
from services.worker.decode.hints import Hints
from services.worker.experts import ExpertCounters, SharedExperts
from services.worker.look_ahead import WINDOW, LookAhead
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import ReadPlan, RecordLayout
from shared.config import PrefetchConfig
from shared.protocol.messages import ExpertsFetched, FetchExperts, PrefetchHint
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient

LAYERS, EXPERTS, TOPK = 7, 16, 4
READ_S = 0.006
SLOT_BYTES = 28672

pytestmark = pytest.mark.system


def through(monkeypatch: pytest.MonkeyPatch, drive: Callable[[str], None]) -> None:
    """Have records pass, by their names, through `drive` before they are read."""
    read = RecordReader.read

    def slowly(self: RecordReader, plan: ReadPlan, slot: SlotWriter, reads: Reads) -> int:
        drive(plan.name)
        return read(self, plan, slot, reads)

    monkeypatch.setattr(RecordReader, "read", slowly)


class GatedDrive:
    """Notes which records it begins to read, and reads none to its end before it is let through."""

    def __init__(self, *keys: tuple[int, int]) -> None:
        self.started: list[tuple[int, int]] = []
        self._gates = {f"layers.{layer}.ffn.experts.{expert}": threading.Event() for layer, expert in keys}
        self._keys = dict(zip(self._gates, keys, strict=True))

    def __call__(self, name: str) -> None:
        self.started.append(self._keys[name])
        assert self._gates[name].wait(20.0)

    def until_started(self, number: int) -> None:
        eventually(lambda: len(self.started) >= number, lambda: self.started)

    def let_through(self, *keys: tuple[int, int]) -> None:
        for layer, expert in keys or self._keys.values():
            self._gates[f"layers.{layer}.ffn.experts.{expert}"].set()


MISS, WISHES = (0, 9), [(1, expert) for expert in range(6)]


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedDrive]:
    drive = GatedDrive(MISS, *WISHES)
    through(monkeypatch, drive)
    yield drive
    drive.let_through()


@contextmanager
def asking(path: Path, drive: GatedDrive) -> Iterator[Worker]:
    with served(write_config(path / "icebox.toml", TINY, reader={"threads": 8})) as stack:
        try:
            worker = Worker(stack)
            worker.open()
            yield worker
        finally:
            drive.let_through()  # expertd ends when its reads have


def test_misses_of_one_look_up_are_read_side_by_side(tmp_path: Path, gated: GatedDrive) -> None:
    with asking(tmp_path, gated) as worker:
        request = worker.client.start(FetchExperts(1, tuple(range(6)), 0))
        gated.until_started(6)
        gated.let_through()
        assert worker.client.finish(request, 10.0) == ExpertsFetched()


@pytest.mark.parametrize("is_guess", [False, True])
def test_a_miss_shares_the_drive_with_two_reads_at_most(tmp_path: Path, gated: GatedDrive, is_guess: bool) -> None:
    with asking(tmp_path, gated) as worker:
        worker.client.send(PrefetchHint(1, tuple(range(6)), is_guess))
        gated.until_started(BACKGROUND)
        miss = worker.client.start(FetchExperts(0, (9,), 0))
        gated.until_started(BACKGROUND + 1)
        assert gated.started == [*WISHES[:BACKGROUND], MISS]
        gated.let_through(MISS)
        assert worker.client.finish(miss, 10.0) == ExpertsFetched()
        assert len(gated.started) == BACKGROUND + 1
        gated.let_through()
        eventually(lambda: (worker.control.slot_table[1, :6] >= 0).all(), lambda: worker.control.slot_table[1])


def test_what_a_miss_held_back_takes_two_readers_when_it_ends(tmp_path: Path, gated: GatedDrive) -> None:
    with asking(tmp_path, gated) as worker:
        miss = worker.client.start(FetchExperts(0, (9,), 0))
        gated.until_started(1)
        worker.client.send(PrefetchHint(1, tuple(range(6))))
        worker.client.call(FetchExperts(0, (), 0), 5.0)  # answered after the hint was taken in
        assert gated.started == [MISS]
        gated.let_through(MISS)
        assert worker.client.finish(miss, 10.0) == ExpertsFetched()
        gated.until_started(1 + BACKGROUND)
        assert sorted(gated.started) == [MISS, *WISHES[:BACKGROUND]]


def test_only_what_was_not_asked_for_before_tells_how_long_a_read_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its way already comes sooner, what is asked for in company later."""
    read_s: list[float] = []
    monkeypatch.setattr(LookAhead, "was_read", lambda self, seconds: read_s.append(seconds))
    through(monkeypatch, lambda name: time.sleep(READ_S))
    config = write_config(tmp_path / "icebox.toml", TINY)
    with served(config) as stack, opened(stack, ExpertCounters()) as experts, experts.step():
        experts.hint(1, [3])
        experts.guess(2, lambda: [4])
        for layer, ids, number in ((1, [3], 0), (2, [4], 0), (3, [5, 6], 0), (4, [7], 1), (4, [8], 2)):
            look_up = experts.look_up(layer, ids)
            look_up.wait()
            look_up.done()
            assert len(read_s) == number
        look_up = experts.look_up(5, [0], ahead=[1])
        look_up.wait()
        look_up.done()
        experts.look_up(5, [1]).wait()
    assert len(read_s) == 3
    assert all(seconds >= READ_S for seconds in read_s)


class Decoding:
    """Layers want random experts, and the layer before guesses half of them; `layer_s` is a layer's without waits."""

    def __init__(self, experts: SharedExperts, layer_s: float) -> None:
        self.experts = experts
        self.layer_s = layer_s
        self._rng = random.Random(4)

    def steps(self, number: int) -> None:
        for _ in range(number):
            wanted = [sorted(self._rng.sample(range(EXPERTS), TOPK)) for _ in range(LAYERS)]
            with self.experts.step():
                for layer, ids in enumerate(wanted):
                    self.layer(layer, ids, self._guess(wanted[layer + 1]) if layer + 1 < LAYERS else [])

    def layer(self, layer: int, wanted: list[int], guess: list[int]) -> None:
        """As a model's layer on a CPU."""
        look_up = self.experts.look_up(layer, wanted)
        if guess:
            self.experts.guess(layer + 1, lambda: guess)
        look_up.wait()
        time.sleep(self.layer_s)
        look_up.done()

    def _guess(self, wanted: list[int]) -> list[int]:
        others = sorted(set(range(EXPERTS)) - set(wanted))
        return self._rng.sample(wanted, TOPK // 2) + self._rng.sample(others, TOPK // 2)


class GraphDecoding(Decoding):
    """The same as a GPU's graph does it, and the host beside it."""

    def __init__(self, experts: SharedExperts, layer_s: float) -> None:
        super().__init__(experts, layer_s)
        self._hints = Hints(EXPERTS, torch.device("cpu"))
        self._hints.begin(experts)
        self._guessed: tuple[int, ...] = ()

    def layer(self, layer: int, wanted: list[int], guess: list[int]) -> None:
        control = self.experts.control
        row, following = control.slot_table[layer], control.slot_table[(layer + 1) % LAYERS]
        missing, held = tuple(e for e in wanted if row[e] < 0), tuple(int(row[e]) for e in wanted if row[e] >= 0)
        right = len(set(self._guessed).intersection(wanted))
        self._hints.judged += torch.tensor([len(self._guessed), right], dtype=torch.int32)
        if missing:
            self.experts.ask(layer, missing, held, control.worker_clock)
        self._guessed = tuple(e for e in guess if following[e] < 0) if self._hints.is_wanted[0] else ()
        if self._guessed:
            self.experts.pass_hint(layer + 1, self._guessed, is_guess=True)
        self._serve_until(lambda: bool((row[list(missing)] >= 0).all()))
        end = time.monotonic() + self.layer_s
        self._serve_until(lambda: time.monotonic() >= end)
        control.worker_clock += 1

    def _serve_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._serve()
        self._serve()

    def _serve(self) -> None:
        self.experts.take_answers()
        self._hints.serve(self.experts)
        time.sleep(0)


@contextmanager
def opened(stack: Stack, counters: ExpertCounters) -> Iterator[SharedExperts]:
    """A worker's provider on half of the experts."""
    client = BlockingClient(stack.config.endpoint("expertd"), make_identity("test"))
    with closing(client):
        client.connect(5.0)
        experts = SharedExperts.open(
            client,
            fingerprint=TensorIndex.open(TINY).fingerprint,
            device="cpu",
            record_bytes=RecordLayout.of(ModelConfig.from_dir(TINY)).record_bytes,
            prefetch=PrefetchConfig(),
            counters=counters,
        )
        with closing(experts):
            yield experts


@pytest.mark.parametrize("kind", [Decoding, GraphDecoding])
@pytest.mark.parametrize(("layer_s", "pays"), [(0.0, False), (2 * READ_S, True)])
def test_guesses_end_that_cannot_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Decoding], layer_s: float, pays: bool
) -> None:
    """Half of them come true, which is enough if a layer takes as long as a read."""
    one_at_a_time = threading.Lock()

    def drive(name: str) -> None:
        with one_at_a_time:
            time.sleep(READ_S)

    through(monkeypatch, drive)
    cache = {"bytes": LAYERS * EXPERTS // 2 * SLOT_BYTES}
    with served(write_config(tmp_path / "icebox.toml", TINY, cache=cache)) as stack:
        counters = ExpertCounters()
        with opened(stack, counters) as experts:
            decoding = kind(experts, layer_s)
            decoding.steps(15)
            before = counters.guessed
            decoding.steps(5)
    assert before > 10, "there was a try"
    assert (counters.guessed > before) == pays
    assert pays or before < WINDOW / 2


def test_waits_are_counted_as_they_end_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stands still in a look-up, and one whose GPU does."""
    through(monkeypatch, lambda name: time.sleep(READ_S))
    counters = ExpertCounters()
    with (
        served(write_config(tmp_path / "icebox.toml", TINY)) as stack,
        opened(stack, counters) as experts,
        experts.step(),
    ):
        look_up = experts.look_up(1, [3])
        look_up.wait()
        look_up.done()
        waited = counters.wait_seconds
        assert waited >= READ_S
        experts.ask(2, (4,), (), experts.control.worker_clock)

        def has_answer() -> bool:
            experts.take_answers()
            return counters.wait_seconds > waited

        eventually(has_answer, lambda: counters)
        assert counters.wait_seconds >= waited + READ_S
