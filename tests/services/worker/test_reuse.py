"""Reuse changes what is computed and no bit of what comes out: conversations with it on, off, and with little room."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import goldens
from helpers.talks import CHUNK, MIN_SEGMENT, PLENTY, TOKENS, Talk, conversation, engine, job, run, said
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import FinishReason, Step
from services.worker.model import LayerState
from shared.errors import ErrorCode, ServiceError

LITTLE = 1_200_000


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


questions = st.tuples(st.integers(0, 400), st.integers(1, 60))
# Which of the talks so far goes on (or is asked again, with no words more), and with what.
turns = st.lists(st.tuples(st.integers(0, 5), st.none() | questions), min_size=3, max_size=5)


@settings(max_examples=4, deadline=None)
@given(turns)
def test_any_conversations_say_the_same_to_the_bit(turns: list[tuple[int, tuple[int, int] | None]]) -> None:
    """Continued, asked again, forked and interleaved, in any order."""
    engines = [engine(limit) for limit in (0, PLENTY, LITTLE)]
    talks = [Talk()]
    for which, question in turns:
        talk = talks[which % len(talks)]
        if question is not None:
            begin, length = question
            talk = talk.ask(goldens.token_ids()[begin : begin + length])
        if not talk.ids or len(talk.ids) > 600:
            continue
        off, *others = (run(e, talk.job()) for e in engines)
        for other in others:
            assert said(other) == said(off)
        talks += [talk.hear(off), talk]
        assert engines[2].sessions.stats()["session_bytes"] <= LITTLE


@functools.cache
def _without_reuse() -> list[list[Step]]:
    return [said(steps) for steps in conversation(engine(0))]


def test_little_room_means_evictions_and_the_same_words() -> None:
    little = engine(LITTLE)
    assert [said(steps) for steps in conversation(little)] == _without_reuse()
    assert little.sessions.stats()["session_evictions"] > 0


@pytest.mark.parametrize("part", ["ring", "group", "index_group", "entries", "index_keys"])
def test_every_part_of_the_state_is_needed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the comparison above fails, so it would notice."""
    for method in ("appended", "passing"):
        whole = getattr(LayerState, method)
        without = lambda *args, whole=whole: {n: v for n, v in whole(*args).items() if n != part}  # noqa: E731
        monkeypatch.setattr(LayerState, method, without)
    subject = engine(PLENTY)
    run(subject, Talk().ask(goldens.token_ids()[:150]).job())
    run(subject, job(goldens.token_ids()[40:300]))  # other words in the state, which must not shine through
    faulty = conversation(subject)
    assert faulty[0][0].cached_tokens == 150
    assert [said(steps) for steps in faulty] != _without_reuse()


def test_a_conversation_computes_only_what_is_new() -> None:
    subject, words = engine(PLENTY), goldens.token_ids()
    talk = Talk().ask(words[:100])
    first = run(subject, talk.job())
    follow_up = talk.hear(first).ask(words[200:230])
    assert [step.cached_tokens for step in first] == [0] * 4
    assert {step.cached_tokens for step in run(subject, follow_up.job())} == {100}
    again = {step.cached_tokens for step in run(subject, follow_up.job())}
    assert again == {len(follow_up.ids)}, "a repeated prompt is not computed at all"
    fork = talk.hear(first).ask(words[300:340])
    assert {step.cached_tokens for step in run(subject, fork.job())} == {100}
    computed = 100 + (len(follow_up.ids) - 100) + (len(fork.ids) - 100)
    assert (subject.counters.prompt_tokens, subject.counters.cached_tokens) == (computed, 200 + len(follow_up.ids))


def test_a_long_conversation_is_nearly_all_kept() -> None:
    """Twenty turns: what is computed again is at most the answer, the question and what is too short to be kept."""
    subject, words, talk = engine(PLENTY), goldens.token_ids(), Talk()
    for turn in range(20):
        talk = talk.ask(words[turn * 5 : turn * 5 + 12])
        steps = run(subject, talk.job())
        assert steps[0].cached_tokens >= len(talk.ids) - 12 - TOKENS - MIN_SEGMENT
        talk = talk.hear(steps)


def test_a_cancelled_prompt_keeps_its_whole_segments() -> None:
    subject, ids = engine(PLENTY), goldens.token_ids()[:200]
    looks = iter([False, False, True, True])
    steps = list(subject.generate(job(ids), goldens.shared("quantised").experts, lambda: next(looks)))
    assert [step.finish for step in steps] == [FinishReason.ABORT]
    steps = run(subject, job(ids))
    assert steps[0].cached_tokens == 2 * CHUNK
    assert said(steps) == said(run(engine(0), job(ids)))


def test_a_failed_prompt_keeps_its_whole_segments() -> None:
    subject, ids = engine(PLENTY), goldens.token_ids()[:200]
    with pytest.raises(ServiceError, match="broken"):
        list(subject.generate(job(ids), _FailingExperts(2), lambda: False))
    steps = run(subject, job(ids))
    assert steps[0].cached_tokens == CHUNK
    assert said(steps) == said(run(engine(0), job(ids)))


class _FailingExperts:
    """Those of the tiny checkpoint, until the middle of step `step`."""

    def __init__(self, step: int) -> None:
        self._inner = goldens.shared("quantised").experts
        self._steps_left = step
        self._look_ups = 0
        self.wave_experts = self._inner.wave_experts
        self.hint = self._inner.hint

    def step(self):
        self._steps_left -= 1
        return self._inner.step()

    def look_up(self, layer, expert_ids, ahead=()):
        self._look_ups += self._steps_left == 0
        if self._look_ups == 4:
            raise ServiceError(ErrorCode.IO_ERROR, "the disk is broken")
        return self._inner.look_up(layer, expert_ids, ahead)


@pytest.mark.parametrize("boundaries", [(0,), (-1,), (5, 5), (7, 6), (11,)])
def test_boundaries_outside_or_out_of_order_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ServiceError, match="boundaries must rise, from 1 to the prompt's 10 tokens") as refusal:
        job(range(1, 11), boundaries).check(512, 100)
    assert refusal.value.code is ErrorCode.BAD_REQUEST


def test_the_end_may_be_a_boundary() -> None:
    job(range(1, 11), (1, 10)).check(512, 100)
