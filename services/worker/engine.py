"""Generation of one sequence: prefill in segments, then one token a step, until a stop id, the length or a cancel.

Knows no socket: the same loop serves requests, benchmarks and tests, whatever provider the experts come from.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from services.worker.experts import ExpertProvider, SharedExperts
from services.worker.model import Model, SequenceState
from services.worker.sampler import GREEDY, Sampler, SamplingParams
from services.worker.sessions import KeptSegment, SessionStore, Trail, cut_prompt
from shared.config import PrefetchConfig
from shared.errors import ErrorCode, ServiceError

if TYPE_CHECKING:
    from services.worker.decode.decoder import Decoder

Draws = Generator[tuple[int, torch.Tensor], None, None]
"""Tokens, and the logits float32 [vocab] that each was drawn from."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. `top_logprobs` -1 is off; `boundaries` are where the prompt may be cut."""

    prompt_ids: Sequence[int]
    max_tokens: int
    params: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int = -1
    boundaries: Sequence[int] = ()

    def check(self, vocab_size: int, max_context: int) -> None:
        """Raises ServiceError (bad_request) naming what the model cannot do."""
        if not self.prompt_ids:
            raise _bad_request("the prompt is empty: at least one token is needed")
        if len(self.prompt_ids) >= max_context:
            raise _bad_request(
                f"the prompt has {len(self.prompt_ids)} tokens, but model.max_context = {max_context} leaves room for "
                f"{max_context - 1} and one of answer; shorten it or raise model.max_context"
            )
        if self.max_tokens < 1:
            raise _bad_request(f"max_tokens must be at least 1, not {self.max_tokens}")
        if outside := [i for i in self.prompt_ids if not 0 <= i < vocab_size]:
            raise _bad_request(f"token id {outside[0]} is outside the vocabulary of {vocab_size} ids")
        if not -1 <= self.top_logprobs <= vocab_size:
            raise _bad_request(f"top_logprobs must be -1 (off) to {vocab_size}, not {self.top_logprobs}")
        edges = (0, *self.boundaries, len(self.prompt_ids) + 1)
        if any(end <= begin for begin, end in itertools.pairwise(edges)):
            raise _bad_request(f"boundaries must rise, from 1 to the prompt's {len(self.prompt_ids)} tokens")
        self.params.check()


def _bad_request(detail: str) -> ServiceError:
    return ServiceError(ErrorCode.BAD_REQUEST, detail)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step added to the sequence: a token, a reason to end, or both.

    `cached_tokens` of the prompt were kept from before; it is the same in every step of a sequence.
    """

    token: int | None = None
    finish: FinishReason | None = None
    logprob: float = 0.0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    cached_tokens: int = 0


@dataclass(slots=True)
class EngineCounters:
    """Cumulative over the life of the worker; times in seconds. Cached tokens are not among the prompt tokens.

    A step is one pass through the model: of a prompt's segment, or of one token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(slots=True)
class Engine:
    """The model and one sequence state, begun anew for every job from what is kept of its prompt.

    `prefill_chunk` and `min_segment` say where prompts are cut (see `cut_prompt`), `prefetch` what decoding hints at.
    """

    model: Model
    max_context: int
    prefill_chunk: int
    min_segment: int = 1
    sessions: SessionStore = field(default_factory=SessionStore)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    counters: EngineCounters = field(default_factory=EngineCounters)
    state: SequenceState = field(init=False)
    decoder: Decoder | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.state = self.model.new_state(self.max_context)
        if self.model.device.type == "cuda":
            from services.worker.decode.decoder import Decoder  # and TileLang, which takes seconds

            self.decoder = Decoder(self.model, [self.state], self.prefetch)

    def generate(self, job: Job, experts: ExpertProvider, cancelled: Callable[[], bool]) -> Iterator[Step]:
        """Yields one `Step` a token; only the last has a finish reason.

        A stop id ends the sequence and is not yielded. A cancel is seen between steps and between prefill segments.
        Whatever the provider raises (ServiceError, PeerLost) passes through; the next job starts from a clean state.
        What is kept from before changes no bit of what is yielded, but for `cached_tokens`.
        """
        ends = cut_prompt(len(job.prompt_ids), job.boundaries, self.prefill_chunk, self.min_segment)
        segments = [job.prompt_ids[begin:end] for begin, end in itertools.pairwise([0, *ends])]
        trail = self.sessions.follow(segments)
        self.state.restore([kept.state for kept in trail.kept])
        cached = self.state.position
        self.counters.cached_tokens += cached
        logits = self._prefill(segments, trail, experts, cancelled)
        room = min(job.max_tokens, self.max_context - len(job.prompt_ids))
        if logits is None:
            yield Step(finish=FinishReason.ABORT, cached_tokens=cached)
            return
        with closing(self._draws(logits, job, room, experts)) as draws:
            for produced in range(1, room + 1):
                if cancelled():
                    yield Step(finish=FinishReason.ABORT, cached_tokens=cached)
                    return
                token, seen = next(draws)
                self.counters.generated_tokens += 1
                if token in job.stop_ids:
                    yield Step(finish=FinishReason.STOP, cached_tokens=cached)
                    return
                finish = FinishReason.LENGTH if produced == room else None
                yield Step(token, finish, *_logprobs(token, seen, job.top_logprobs), cached_tokens=cached)

    def bind(self, experts: SharedExperts) -> None:
        """Decode with this pool from now on."""
        if self.decoder is not None:
            self.decoder.begin(experts)

    def release(self) -> None:
        """The pool goes away."""
        if self.decoder is not None:
            self.decoder.close()

    def _draws(self, logits: torch.Tensor, job: Job, room: int, experts: ExpertProvider) -> Draws:
        if self.decoder is not None and self.decoder.is_open:
            return self._draws_of_gpu(self.decoder, logits, job, room, experts)
        return self._draws_of_host(logits, job, room, experts)

    def _draws_of_host(self, logits: torch.Tensor, job: Job, room: int, experts: ExpertProvider) -> Draws:
        sampler = Sampler(job.params, self.model.device)
        for left in range(room, 0, -1):
            token = sampler.sample(logits)
            yield token, logits
            if left > 1:
                logits = self._decode(token, experts)

    def _draws_of_gpu(
        self, decoder: Decoder, logits: torch.Tensor, job: Job, room: int, experts: ExpertProvider
    ) -> Draws:
        tokens = decoder.tokens(logits.unsqueeze(0), [job.params], room, lookahead=job.top_logprobs < 0)
        with experts.step(), closing(tokens):
            started = time.perf_counter()
            for (token,) in tokens:
                self.counters.decode_seconds += time.perf_counter() - started
                self.counters.steps += 1
                yield token, decoder.logits[0]
                started = time.perf_counter()

    def _prefill(
        self,
        segments: Sequence[Sequence[int]],
        trail: Trail,
        experts: ExpertProvider,
        cancelled: Callable[[], bool],
    ) -> torch.Tensor | None:
        """Take in the segments that were not kept, and keep them; the logits after the last, None if cancelled."""
        started = time.perf_counter()
        logits = trail.kept[-1].logits.to(self.model.device) if trail.kept else None
        for ids in segments[len(trail.kept) :]:
            if cancelled():
                return None
            begin = self.state.position
            logits = self._forward(ids, experts)
            self.counters.prompt_tokens += len(ids)
            if trail.is_keeping:
                trail.add(KeptSegment(self.state.export(begin), logits.to("cpu", copy=True)))
        self.counters.prefill_seconds += time.perf_counter() - started
        return logits

    def _decode(self, token: int, experts: ExpertProvider) -> torch.Tensor:
        started = time.perf_counter()
        logits = self._forward((token,), experts)
        self.counters.decode_seconds += time.perf_counter() - started
        return logits

    def _forward(self, ids: Sequence[int], experts: ExpertProvider) -> torch.Tensor:
        with experts.step():
            logits = self.model.forward(self.state, ids, experts)
        self.counters.steps += 1
        return logits


def _logprobs(token: int, logits: torch.Tensor, top: int) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    """That of the token, and the `top` likeliest ids with theirs; nothing if `top` is -1."""
    if top < 0:
        return 0.0, (), ()
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(top)
    return float(logprobs[token]), tuple(ids.tolist()), tuple(values.tolist())
