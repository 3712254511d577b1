"""Generation of one sequence: prefill in chunks, then one token a step, until a stop id, the length or a cancel.

Pure of sockets: the same loop serves requests, benchmarks and tests, whatever provider the experts come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from services.worker.experts import ExpertProvider
from services.worker.model import Model, SequenceState
from services.worker.sampler import GREEDY, Sampler, SamplingParams
from shared.errors import ErrorCode, ServiceError


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. `top_logprobs` -1 is off."""

    prompt_ids: Sequence[int]
    max_tokens: int
    params: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int = -1

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
        self.params.check()


def _bad_request(detail: str) -> ServiceError:
    return ServiceError(ErrorCode.BAD_REQUEST, detail)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step added to the sequence: a token, a reason to end, or both."""

    token: int | None = None
    finish: FinishReason | None = None
    logprob: float = 0.0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class EngineCounters:
    """Cumulative over the life of the worker; times in seconds."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(slots=True)
class Engine:
    """The model and one sequence state, reset for every job."""

    model: Model
    max_context: int
    prefill_chunk: int
    counters: EngineCounters = field(default_factory=EngineCounters)
    state: SequenceState = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.model.new_state(self.max_context)

    def generate(self, job: Job, experts: ExpertProvider, cancelled: Callable[[], bool]) -> Iterator[Step]:
        """Yields one `Step` a token; only the last has a finish reason.

        A stop id ends the sequence and is not yielded. A cancel is seen between steps and between prefill chunks.
        Whatever the provider raises (ServiceError, PeerLost) passes through; the next job starts from a clean state.
        """
        self.state.reset()
        sampler = Sampler(job.params, self.model.device)
        logits = self._prefill(job.prompt_ids, experts, cancelled)
        room = min(job.max_tokens, self.max_context - len(job.prompt_ids))
        for produced in range(1, room + 1):
            if logits is None or cancelled():
                yield Step(finish=FinishReason.ABORT)
                return
            token = sampler.sample(logits)
            self.counters.generated_tokens += 1
            if token in job.stop_ids:
                yield Step(finish=FinishReason.STOP)
                return
            yield _step(token, logits, job.top_logprobs, FinishReason.LENGTH if produced == room else None)
            if produced < room:
                logits = self._decode(token, experts)

    def _prefill(
        self, ids: Sequence[int], experts: ExpertProvider, cancelled: Callable[[], bool]
    ) -> torch.Tensor | None:
        started = time.perf_counter()
        logits = None
        for begin in range(0, len(ids), self.prefill_chunk):
            if cancelled():
                return None
            chunk = ids[begin : begin + self.prefill_chunk]
            logits = self._forward(chunk, experts)
            self.counters.prompt_tokens += len(chunk)
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


def _step(token: int, logits: torch.Tensor, top: int, finish: FinishReason | None) -> Step:
    if top < 0:
        return Step(token, finish)
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(top)
    return Step(token, finish, float(logprobs[token]), tuple(ids.tolist()), tuple(values.tolist()))
