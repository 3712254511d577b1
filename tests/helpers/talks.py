"""Conversations on the tiny checkpoint as the front would send them, for engines with and without kept sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from helpers import goldens
from services.worker.engine import Engine, Job, Step
from services.worker.sampler import SamplingParams
from services.worker.sessions import SessionStore

CHUNK, MIN_SEGMENT = 64, 16
TOKENS = 4
PLENTY = 1 << 26


def engine(limit: int, device: torch.device = goldens.CPU) -> Engine:
    """One that keeps at most `limit` bytes."""
    model = goldens.shared("quantised", device).model
    return Engine(model, goldens.MAX_CONTEXT, CHUNK, MIN_SEGMENT, SessionStore(limit))


def run(subject: Engine, job: Job) -> list[Step]:
    return list(subject.generate(job, goldens.shared("quantised", subject.model.device).experts, lambda: False))


def said(steps: Sequence[Step]) -> list[Step]:
    """Everything but what reuse may change."""
    return [dataclasses.replace(step, cached_tokens=0) for step in steps]


def answer(steps: Sequence[Step]) -> tuple[int, ...]:
    return tuple(step.token for step in steps if step.token is not None)


def job(ids: Sequence[int], boundaries: Sequence[int] = ()) -> Job:
    """A seeded draw of `TOKENS` tokens, each with the log-probabilities of the whole vocabulary."""
    vocab_size = goldens.shared("quantised").model.config.vocab_size
    params = SamplingParams(temperature=0.8, seed=5)
    return Job(tuple(ids), TOKENS, params, top_logprobs=vocab_size, boundaries=tuple(boundaries))


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation so far; every prompt ends at a boundary."""

    ids: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()

    def ask(self, words: Sequence[int]) -> Talk:
        ids = self.ids + tuple(words)
        return Talk(ids, (*self.boundaries, len(ids)))

    def hear(self, steps: Sequence[Step]) -> Talk:
        return Talk(self.ids + answer(steps), self.boundaries)

    def job(self) -> Job:
        return job(self.ids, self.boundaries)


def conversation(subject: Engine) -> list[list[Step]]:
    """A long prompt, what follows on it, the same again, and another way to go on."""
    words = goldens.token_ids()
    talk = Talk().ask(words[:150])
    first = run(subject, talk.job())
    heard = talk.hear(first)
    followed = [run(subject, heard.ask(words[200:230]).job()) for _ in range(2)]
    return [first, *followed, run(subject, heard.ask(words[300:345]).job())]
