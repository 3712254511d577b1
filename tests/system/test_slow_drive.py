"""Beside a drive that is slow, what is read on a hint or a guess keeps nobody waiting for long, or is not read."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from helpers.expertd import TINY, Worker, served
from helpers.gpu import eventually
from helpers.services import Stack, write_config

from services.expertd.landing import SlotWriter
from services.expertd.reader import RecordReader
from services.expertd.scheduler import BACKGROUND
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
        self._experts = experts
        self._layer_s = layer_s
        self._rng = random.Random(4)

    def steps(self, number: int) -> None:
        for _ in range(number):
            with self._experts.step():
                self._step()

    def _step(self) -> None:
        wanted = [sorted(self._rng.sample(range(EXPERTS), TOPK)) for _ in range(LAYERS)]
        for layer, ids in enumerate(wanted):
            look_up = self._experts.look_up(layer, ids)
            if layer + 1 < LAYERS:
                right = self._rng.sample(wanted[layer + 1], TOPK // 2)
                wrong = self._rng.sample(sorted(set(range(EXPERTS)) - set(wanted[layer + 1])), TOPK // 2)
                self._experts.guess(layer + 1, lambda ids=right + wrong: ids)
            look_up.wait()
            time.sleep(self._layer_s)
            look_up.done()


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


@pytest.mark.parametrize(("layer_s", "pays"), [(0.0, False), (2 * READ_S, True)])
def test_guesses_end_that_cannot_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer_s: float, pays: bool
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
            decoding = Decoding(experts, layer_s)
            decoding.steps(20)
            before = counters.guessed
            decoding.steps(5)
    assert before > 10, "there was a try"
    assert (counters.guessed > before) == pays
    assert pays or before < WINDOW / 2
