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
from services.expertd.scheduler import BACKGROUND
from services.worker.decode.hints import Hints
from services.worker.experts import ExpertCounters, SharedExperts
from services.worker.look_ahead import WINDOW
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

    def slowly(self: RecordReader, plan: ReadPlan, slot: SlotWriter) -> int:
        drive(plan.name)
        return read(self, plan, slot)

    monkeypatch.setattr(RecordReader, "read", slowly)


@pytest.mark.parametrize("is_guess", [False, True])
def test_a_miss_shares_the_drive_with_two_reads_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_guess: bool
) -> None:
    started: list[str] = []
    names = [f"layers.{layer}.ffn.experts.{expert}" for layer, expert in ((0, 9), *((1, e) for e in range(6)))]
    gates = {name: threading.Event() for name in names}

    def drive(name: str) -> None:
        started.append(name)
        assert gates[name].wait(20.0)

    through(monkeypatch, drive)
    try:
        with served(write_config(tmp_path / "icebox.toml", TINY, reader={"threads": 8})) as stack:
            worker = Worker(stack)
            worker.open()
            worker.client.send(PrefetchHint(1, tuple(range(6)), is_guess))
            eventually(lambda: len(started) >= BACKGROUND, lambda: started)
            miss = worker.client.start(FetchExperts(0, (9,), 0))
            eventually(lambda: names[0] in started, lambda: started)
            assert started == [*names[1 : 1 + BACKGROUND], names[0]]
            gates[names[0]].set()
            assert worker.client.finish(miss, 10.0) == ExpertsFetched()
            assert len(started) == 1 + BACKGROUND
            for name in names[1:]:
                gates[name].set()
            eventually(lambda: (worker.control.slot_table[1, :6] >= 0).all(), lambda: worker.control.slot_table[1])
            assert sorted(started) == sorted(names)
    finally:
        for name in names:
            gates[name].set()


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
