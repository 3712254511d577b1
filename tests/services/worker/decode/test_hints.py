"""What a GPU would write into the ring of hints reaches expertd once and in order, or not at all."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.expertd import TINY, expertd
from helpers.gpu import eventually

from kernels.decode.hints import HINTS
from services.worker.decode.hints import Hints
from services.worker.experts import ExpertCounters, SharedExperts
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import RecordLayout
from shared.config import PrefetchConfig
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient


class Listener:
    """Experts that note what they are told."""

    def __init__(self, clock: int = 0) -> None:
        self.control = SimpleNamespace(worker_clock=clock)
        self.heard: list[tuple[int, tuple[int, ...], bool]] = []
        self.judged: list[tuple[int, int, int]] = []
        self.wants_guesses = True

    def judge_guesses(self, look_ups: int, guessed: int, right: int) -> bool:
        self.judged.append((look_ups, guessed, right))
        return self.wants_guesses

    def pass_hint(self, layer: int, expert_ids: tuple[int, ...], is_guess: bool) -> None:
        self.heard.append((layer, expert_ids, is_guess))


def write(hints: Hints, layer: int, ids: tuple[int, ...], clock: int = 0, is_guess: bool = False) -> None:
    """As `write_hint` in hints.cuh."""
    number = int(hints.hinted[0])
    words = [number + 1, is_guess, layer, clock & 0xFFFFFFFF, clock >> 32, len(ids), *ids]
    signed = [word - (word >> 31 << 32) for word in words]
    hints.ring[number % HINTS, : len(words)] = torch.tensor(signed, dtype=torch.int32)
    hints.hinted[0] += 1


@pytest.fixture
def hints() -> Hints:
    return Hints(256, torch.device("cpu"))


def test_each_is_passed_on_once_and_in_order(hints: Hints) -> None:
    rng, listener, expected = random.Random(1), Listener(), []
    for _ in range(5 * HINTS):
        if rng.random() < 0.1:
            hints.serve(listener)
            assert listener.heard == expected
        hint = rng.randrange(43), tuple(rng.sample(range(256), rng.randint(1, 6))), rng.random() < 0.5
        write(hints, *hint[:2], is_guess=hint[2])
        expected.append(hint)
    hints.serve(listener)
    hints.serve(listener)
    assert listener.heard == expected


@pytest.mark.parametrize("clock", [5, 2**31 + 3, 2**32 - 1, 2**40 + 2**31])
def test_one_whose_look_up_is_over_is_dropped(hints: Hints, clock: int) -> None:
    listener = Listener(clock)
    for number, at in enumerate((clock - 1, clock, clock + 1)):
        write(hints, number, (number,), clock=at)
    hints.serve(listener)
    assert [layer for layer, _, _ in listener.heard] == [1, 2]


@pytest.mark.parametrize("unread", [HINTS, HINTS + 1, 3 * HINTS - 1, 10 * HINTS + 7])
def test_what_was_overwritten_is_forgotten_and_what_follows_is_not(hints: Hints, unread: int) -> None:
    listener = Listener()
    write(hints, 1, (9,))
    hints.serve(listener)
    for number in range(unread):
        write(hints, 2, (number,))
    hints.serve(listener)
    heard = [ids[0] for layer, ids, _ in listener.heard if layer == 2]
    assert heard[-1] == unread - 1
    assert heard == sorted(set(heard))
    assert set(heard) <= set(range(unread - HINTS, unread))
    assert unread > HINTS or heard == list(range(HINTS))
    for number in range(HINTS):
        write(hints, 3, (number,))
        hints.serve(listener)
    assert listener.heard[-HINTS:] == [(3, (number,), False) for number in range(HINTS)]


def test_a_new_request_begins_with_none(hints: Hints) -> None:
    listener = Listener()
    for number in range(HINTS + 5):
        write(hints, 4, (number,))
    hints.begin(listener)
    hints.serve(listener)
    assert listener.heard == []
    write(hints, 4, (1, 2))
    hints.serve(listener)
    assert listener.heard == [(4, (1, 2), False)]


def test_guesses_are_judged_by_what_is_new(hints: Hints) -> None:
    listener = Listener(clock=100)
    hints.begin(listener)
    assert (listener.judged, hints.is_wanted.tolist()) == ([(0, 0, 0)], [1])
    for clock, judged, news in ((143, (5, 3), (43, 5, 3)), (186, (9, 3), (43, 4, 0)), (186, (9, 3), (0, 0, 0))):
        listener.control.worker_clock = clock
        hints.judged[:] = torch.tensor(judged)
        listener.wants_guesses = not listener.wants_guesses
        hints.judge(listener)
        assert listener.judged[-1] == news
        assert hints.is_wanted.tolist() == [listener.wants_guesses]
    hints.begin(listener)
    assert hints.judged.tolist() == [0, 0]
    assert listener.judged[-1] == (0, 0, 0)


def test_guesses_are_judged_whenever_a_layer_has_ended(hints: Hints) -> None:
    """Not only between steps: a try that costs too much ends within a few layers."""
    listener = Listener(clock=100)
    hints.begin(listener)
    for clock, judgements in ((100, 1), (101, 2), (101, 2), (104, 3)):
        listener.control.worker_clock = clock
        hints.serve(listener)
        assert len(listener.judged) == judgements
    assert [look_ups for look_ups, _, _ in listener.judged] == [0, 1, 3]


@pytest.mark.system
def test_expertd_reads_what_it_is_told(tmp_path: Path, hints: Hints) -> None:
    index = TensorIndex.open(TINY)
    with expertd(tmp_path) as stack:
        client = BlockingClient(stack.config.endpoint("expertd"), make_identity("test"))
        stack.closing.callback(client.close)
        client.connect(5.0)
        counters = ExpertCounters()
        experts = SharedExperts.open(
            client,
            fingerprint=index.fingerprint,
            device="cpu",
            record_bytes=RecordLayout.of(ModelConfig.from_dir(TINY)).record_bytes,
            prefetch=PrefetchConfig(),
            counters=counters,
        )
        table = experts.control.slot_table
        with experts.step():
            write(hints, 1, (2, 7))
            write(hints, 2, (3,), is_guess=True)
            hints.serve(experts)
            eventually(lambda: (table >= 0).sum() == 3, lambda: (table >= 0).nonzero())
            assert (table >= 0).nonzero()[1].tolist() == [2, 7, 3]
        assert (counters.hint_messages, counters.fetch_messages) == (2, 0)
        experts.close()
