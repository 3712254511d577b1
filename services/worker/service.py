"""The worker's shell: requests from the socket to the engine, tokens back, and the connection to expertd.

The socket's thread only queues; one thread, the caller of `run`, owns the model and the experts. If expertd goes away,
what runs and waits ends with one error each, and the worker looks for expertd again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from services.worker.engine import Engine, FinishReason, Job, Step
from services.worker.experts import ExpertCounters, SharedExperts
from services.worker.request_queue import RequestQueue, Ticket
from services.worker.sampler import SamplingParams
from shared.checkpoint.records import RecordLayout
from shared.config import Config
from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import Generate, TokensGenerated
from shared.runtime.context import ServiceContext
from shared.transport.client import BlockingClient
from shared.transport.request import Request

log = logging.getLogger(__name__)

# How often an idle worker looks whether it should stop or expertd is gone.
IDLE_POLL_S = 0.02
RETRY_S = 0.1
_NOT_YET = (ErrorCode.STARTING, ErrorCode.PEER_LOST, ErrorCode.TIMEOUT, ErrorCode.NO_CAPACITY)


@dataclass(slots=True)
class RequestCounters:
    """Cumulative over the life of the worker, but for `requests_running`, which is 0 or 1 now."""

    requests_done: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    requests_running: int = 0


class WorkerService:
    """Everything between the worker's sockets and its engine."""

    def __init__(self, context: ServiceContext, engine: Engine, fingerprint: str) -> None:
        self._context = context
        self._config: Config = context.config
        self._engine = engine
        self._fingerprint = fingerprint
        self._record_bytes = RecordLayout.of(engine.model.config).record_bytes
        self._waiting = RequestQueue(self._config.worker.max_queue)
        self._counters = RequestCounters()
        self._expert_counters = ExpertCounters()
        self._has_experts = False
        # Nothing is queued after the loss of expertd, which ends what is: nobody would look at it.
        self._accepting = threading.Lock()
        self._graph_launches: dict[str, float] = {}

    def handle(self, request: Request) -> None:
        """Called by the socket's thread: check, queue, return."""
        message = request.message
        if not isinstance(message, Generate):
            raise ServiceError(ErrorCode.UNSUPPORTED, f"the worker does not answer {type(message).__name__}")
        job = _job(message)
        job.check(self._engine.model.config.vocab_size, self._engine.max_context)
        with self._accepting:
            if self._context.stopping:
                raise _stopping()
            if not self._has_experts:
                raise ServiceError(ErrorCode.STARTING, "the worker waits for expertd")
            self._waiting.put(Ticket(request, job))

    def run(self) -> None:
        """Serve until the context stops. Called once, by the thread that owns the model."""
        while not self._context.stopping:
            try:
                with self._experts() as experts:
                    self._serve(experts)
            except Stopped:
                break
            except PeerLost as lost:
                log.log(self._context.failure_level, "expertd lost detail=%r", lost.detail)
                self._fail_waiting(self._loss(f"the expert daemon went away: {lost.detail}"))
        self._fail_waiting(_stopping())

    def stats(self) -> tuple[dict[str, float], dict[str, str]]:
        """Counters and gauges, and labels, for the stats socket.

        The counters are described at their classes. The gauges: `requests_waiting`, `position` and `max_context` in
        tokens of the one sequence, `state_bytes` of its caches.
        """
        counters = asdict(self._counters) | asdict(self._engine.counters) | asdict(self._expert_counters)
        counters["requests_cancelled"] += self._waiting.num_cancelled
        gauges = {
            "requests_waiting": self._waiting.num_waiting,
            "position": self._engine.state.position,
            "max_context": self._engine.max_context,
            "state_bytes": self._engine.state.nbytes,
        }
        labels = {"device": self._config.worker.device, "checkpoint": self._config.model.path.name}
        return counters | gauges | self._graph_stats() | self._engine.sessions.stats(), labels

    def _graph_stats(self) -> dict[str, float]:
        """Nothing on a CPU, which decodes without a graph."""
        decoder = self._engine.decoder
        if decoder is None:
            return {}
        return asdict(decoder.counters) | self._graph_launches

    def _serve(self, experts: SharedExperts) -> None:
        while not self._context.stopping:
            ticket = self._waiting.take(IDLE_POLL_S)
            if ticket is None:
                experts.check_peer()
                continue
            self._counters.requests_running = 1
            try:
                self._answer(ticket, experts)
            finally:
                self._counters.requests_running = 0

    def _answer(self, ticket: Ticket, experts: SharedExperts) -> None:
        """One request, to its one final reply. A lost expertd ends it too, and is then raised on."""
        progress = _Progress(ticket)
        decoder = self._engine.decoder
        steps_before = decoder.counters.graph_steps if decoder else 0

        def cancelled() -> bool:
            return ticket.request.cancelled.is_set() or self._context.stopping

        try:
            for step in self._engine.generate(ticket.job, experts, cancelled):
                if step.finish is FinishReason.ABORT and not ticket.request.cancelled.is_set():
                    raise _stopping()
                progress.send(step)
        except PeerLost as lost:
            self._fail(ticket, self._loss(f"the expert daemon went away while this request ran: {lost.detail}"))
            raise
        except ServiceError as error:
            log.log(self._context.failure_level, "request failed code=%s detail=%r", error.code.value, error.detail)
            self._fail(ticket, error)
        else:
            # Read here and not where stats are collected: graphs come and go in this thread.
            if decoder is not None and decoder.counters.graph_steps > steps_before:
                self._graph_launches = asdict(decoder.launches)
            aborted = progress.finish is FinishReason.ABORT
            self._counters.requests_cancelled += aborted
            self._counters.requests_done += not aborted

    def _fail(self, ticket: Ticket, error: ServiceError) -> None:
        self._counters.requests_failed += 1
        ticket.request.fail(error.code, error.detail)

    def _fail_waiting(self, error: ServiceError) -> None:
        self._counters.requests_failed += self._waiting.fail_all(error.code, error.detail)

    def _loss(self, detail: str) -> ServiceError:
        """Why a request fails that lost expertd: services that are stopped together may see each other go."""
        return _stopping() if self._context.stopping else PeerLost(detail)

    @contextmanager
    def _experts(self) -> Iterator[SharedExperts]:
        """The pool of a running expertd, waited for as long as it takes."""
        self._context.progress("waiting for expertd")
        client = BlockingClient(self._config.endpoint("expertd"), self._context.identity)
        try:
            experts = self._open(client)
            try:
                self._engine.bind(experts)
                self._has_experts = True
                self._context.ready()
                yield experts
            finally:
                with self._accepting:
                    self._has_experts = False
                self._engine.release()
                experts.close()
        finally:
            client.close()

    def _open(self, client: BlockingClient) -> SharedExperts:
        """Connect and map the pool, again and again while expertd is absent or starting."""
        while True:
            try:
                client.connect(RETRY_S)
                return SharedExperts.open(
                    client,
                    fingerprint=self._fingerprint,
                    device=self._config.worker.device,
                    record_bytes=self._record_bytes,
                    prefetch=self._config.prefetch,
                    counters=self._expert_counters,
                )
            except ServiceError as error:
                if error.code not in _NOT_YET:
                    raise
                self._context.progress(f"waiting for expertd ({error.detail})")
            if self._context.wait(RETRY_S):
                raise Stopped


def _stopping() -> ServiceError:
    return ServiceError(ErrorCode.DRAINING, "the worker is stopping")


class Stopped(Exception):
    """The service was asked to stop while it waited for expertd."""


class _Progress:
    """Turns the steps of one request into its replies."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._completion_tokens = 0
        self._ttft_s = 0.0
        self.finish: FinishReason | None = None

    def send(self, step: Step) -> None:
        elapsed = time.perf_counter() - self._ticket.accepted
        if step.token is not None:
            self._completion_tokens += 1
            self._ttft_s = self._ttft_s or elapsed
        self.finish = step.finish
        reply = TokensGenerated(
            token_ids=() if step.token is None else (step.token,),
            finish_reason=step.finish.value if step.finish else "",
            prompt_tokens=len(self._ticket.job.prompt_ids),
            completion_tokens=self._completion_tokens,
            cached_tokens=step.cached_tokens,
            ttft_s=self._ttft_s,
            elapsed_s=elapsed,
            logprobs=() if step.token is None or self._ticket.job.top_logprobs < 0 else (step.logprob,),
            top_ids=step.top_ids,
            top_logprobs=step.top_logprobs,
        )
        if step.finish:
            self._ticket.request.reply(reply)
        else:
            self._ticket.request.stream(reply)


def _job(message: Generate) -> Job:
    params = SamplingParams(message.temperature, message.top_p, message.top_k, message.min_p, message.seed)
    stop_ids = frozenset(message.stop_ids)
    return Job(
        message.prompt_ids, message.max_tokens, params, stop_ids, message.top_logprobs, boundaries=message.boundaries
    )
