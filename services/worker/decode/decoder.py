"""Tokens from a GPU: graphs of decode steps, two in flight, and the host's part in them.

The host replays a graph, passes its tickets and hints on while it runs, and reads the token that came out. It never
waits for one step before it has launched the next, unless somebody wants log-probabilities.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from kernels.decode.sampling import STEPS
from services.worker.decode.buffers import Buffers, sampling_words
from services.worker.decode.control import Control
from services.worker.decode.extent import extents
from services.worker.decode.states import join
from services.worker.decode.step import DecodeStep
from services.worker.decode.tickets import TicketedExperts, Tickets
from services.worker.decode.weights import StepWeights
from services.worker.model import Model, SequenceState
from services.worker.sampler import GREEDY, SamplingParams
from shared.checkpoint.records import RecordLayout
from shared.config import PrefetchConfig
from shared.errors import ServiceError

SCRATCH_POSITIONS = 256
DEFAULT_PREFETCH = PrefetchConfig()


@dataclass(slots=True)
class DecodeCounters:
    """Cumulative over the life of the worker: steps of decoding, experts that they missed, and seconds they waited.

    A sync is a call that blocks the host until the GPU is done: where a request begins and ends, and between its steps,
    where a graph is captured and nowhere else.
    """

    graph_steps: int = 0
    graph_misses: int = 0
    graph_wait_seconds: float = 0.0
    graph_request_syncs: int = 0
    graph_step_syncs: int = 0


@dataclass(frozen=True, slots=True)
class Launches:
    """Kernels of the longest step captured so far: in all, and the mean and maximum of its layers."""

    graph_launches_per_step: int
    graph_launches_per_layer: float
    graph_most_launches_per_layer: int


@dataclass(slots=True)
class _Capture:
    step: DecodeStep
    forward: torch.cuda.CUDAGraph
    draw: torch.cuda.CUDAGraph


@dataclass(slots=True)
class _Opened:
    """What belongs to one mapping of the pool: graphs know its addresses."""

    experts: TicketedExperts
    control: Control
    tickets: Tickets
    captures: dict[int, _Capture] = field(default_factory=dict)


class Decoder:
    """Decodes the sequences of `states`, which prefill fills; their tensors are shared with it."""

    def __init__(
        self,
        model: Model,
        states: list[SequenceState],
        prefetch: PrefetchConfig = DEFAULT_PREFETCH,
        eager: bool = False,
    ) -> None:
        config = model.config
        self.counters = DecodeCounters()
        self._model = model
        self._states = states
        self._eager = eager
        self._extents = extents(states[0].max_context)
        self._tensors = join(states, config)
        self._buffers = Buffers(model, len(states), self._extents[-1])
        self._weights = StepWeights.of(model, prefetch)
        self._opened: _Opened | None = None
        self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]

    @property
    def is_open(self) -> bool:
        """Whether there is a pool to decode with."""
        return self._opened is not None

    @property
    def launches(self) -> Launches:
        assert self._opened is not None
        steps = [capture.step for capture in self._opened.captures.values()]
        longest = max(steps, key=lambda step: step.num_launches)
        layers = longest.layer_launches
        return Launches(longest.num_launches, statistics.mean(layers), max(layers))

    def warm_up(self) -> None:
        """Compile and load every kernel, on a sequence and a pool of its own."""
        config, model = self._model.config, self._model
        scratch = [model.new_state(SCRATCH_POSITIONS) for _ in self._states]
        slot_bytes = RecordLayout.of(config).slot_bytes
        pool = torch.zeros(1, slot_bytes, dtype=torch.uint8, device=model.device)
        control = Control.scratch(config.num_moe_layers, config.n_routed_experts, model.device)
        tensors = join(scratch, config)
        for extent in self._extents:
            step = DecodeStep(model, self._weights, tensors, self._buffers, pool, control, extent)
            step.forward()
            step.draw()
        torch.cuda.synchronize(model.device)

    def close(self) -> None:
        """Forget the pool: nothing of it is mapped after this."""
        self._opened = None

    def begin(self, experts: TicketedExperts) -> None:
        """Bind to a pool that was opened; graphs are captured as they are needed."""
        config = self._model.config
        assert experts.control_addresses is not None, "the control block is not on the GPU"
        assert len(self._states) * config.num_experts_per_tok <= experts.wave_experts, "a step may want more experts"
        sizes = config.num_moe_layers, config.n_routed_experts
        control = Control.at(experts.control_addresses, *sizes, str(self._model.device))
        self._opened = _Opened(experts, control, Tickets(experts, experts.control.ticket_head))

    def tokens(
        self, logits: torch.Tensor, params: list[SamplingParams], rooms: int, lookahead: bool = True
    ) -> Generator[list[int], None, None]:
        """The next tokens, one a sequence, at most `rooms` times. logits: float32 [s, vocab] after the prompts.

        `self.logits` are those that a token was drawn from, if `lookahead` is off. Inside `experts.step()`.

        Raises:
            ServiceError, PeerLost: an expert cannot be had; the sequences are lost.
        """
        assert self._opened is not None, "no pool is open"
        self._start(logits, params)
        launched, events = 0, deque[torch.cuda.Event]()
        with self._ended():
            for done in range(rooms):
                while launched < min(rooms, done + (2 if lookahead else 1)):
                    events.append(self._launch(is_first=launched == 0))
                    launched += 1
                self._wait(events.popleft())
                if done + 1 < rooms:  # the next step's, before somebody takes time over this one's token
                    self._buffers.hints.serve(self._opened.experts)
                self._buffers.hints.judge(self._opened.experts)
                yield self._buffers.log[done % STEPS].tolist()

    def forced(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """The logits float32 [vocab] after each of these tokens, of one sequence: for comparing, not for speed."""
        self._start(self._buffers.logits, [GREEDY])
        rows = []
        with self._ended():
            for token in ids:
                capture = self._capture(self._states[0].position)
                self._buffers.positions[0], self._buffers.tokens[0] = self._states[0].position, token
                self._run(capture.forward, capture.step.forward)
                self._drain()
                self._states[0].position += 1
                rows.append(self._buffers.logits[0].clone())
        return rows

    @property
    def logits(self) -> torch.Tensor:
        return self._buffers.logits

    def _start(self, logits: torch.Tensor, params: list[SamplingParams]) -> None:
        """The host's view of positions and counts becomes the device's."""
        opened, b = self._opened, self._buffers
        assert opened is not None
        for number, (state, own) in enumerate(zip(self._states, params, strict=True)):
            seed = own.seed if own.seed >= 0 else secrets.randbits(63)
            b.positions[number] = state.position - 1
            self._upload(b.sampling[number], sampling_words(own, seed))
        b.step.zero_()
        control = opened.experts.control
        self._upload(b.own, torch.tensor([control.worker_clock, control.ticket_head, 0]))
        b.waited.zero_()
        b.hints.begin(opened.experts)
        self._upload(b.counts, torch.from_numpy(control.uses.astype("int64")))
        b.logits.copy_(logits)

    def _upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """From pageable memory, which blocks until it is done."""
        target.copy_(source)
        self.counters.graph_request_syncs += 1

    def _launch(self, is_first: bool = False) -> torch.cuda.Event:
        capture = self._capture(max(state.position for state in self._states))
        if not is_first:
            self._run(capture.forward, capture.step.forward)
            for state in self._states:
                state.position += 1
            self.counters.graph_steps += 1
        self._run(capture.draw, capture.step.draw)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _run(self, graph: torch.cuda.CUDAGraph, eager: Callable[[], None]) -> None:
        if self._eager:
            eager()
        else:
            graph.replay()

    def _capture(self, position: int) -> _Capture:
        opened = self._opened
        assert opened is not None
        extent = next(e for e in self._extents if position < e.positions)
        if extent.positions not in opened.captures:
            # Capturing blocks this thread until the GPU is done; a step in flight may wait for what only this asks for.
            self._drain()
            pool = opened.experts.pool
            step = DecodeStep(self._model, self._weights, self._tensors, self._buffers, pool, opened.control, extent)
            graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
            if not self._eager:
                for graph, launches in zip(graphs, (step.forward, step.draw), strict=True):
                    with torch.cuda.graph(graph, stream=self._stream):  # synchronises as it begins
                        launches()
                self.counters.graph_step_syncs += len(graphs)
            opened.captures[extent.positions] = _Capture(step, *graphs)
        return opened.captures[extent.positions]

    def _wait(self, event: torch.cuda.Event) -> None:
        """Until the step is done, whose tickets are served meanwhile."""
        assert self._opened is not None
        while not event.query():  # type: ignore[no-untyped-call]
            self._opened.tickets.serve()
            self._buffers.hints.serve(self._opened.experts)
            time.sleep(0)  # the socket's thread sends tokens meanwhile, and would wait 5 ms for its turn

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """However decoding ends, nothing runs on the GPU afterwards, and no wait in it lasts."""
        opened = self._opened
        assert opened is not None
        control = opened.experts.control
        try:
            try:
                yield
            except GeneratorExit:
                with suppress(ServiceError):  # the step ahead ends as if it were wanted; if it cannot, it was not
                    self._drain()
                raise
        except BaseException:
            control.abort = True
            raise
        finally:
            torch.cuda.synchronize(self._model.device)
            control.abort = False
            # The GPU is at rest, so the host's thread writes these again.
            self.counters.graph_misses += opened.tickets.missed
            opened.tickets.missed = 0
            opened.tickets.answered = control.ticket_head
            # The last layer's wait is not in the sum yet.
            waited = self._buffers.own[2] + self._buffers.waited.view(torch.int32)[0]
            self.counters.graph_wait_seconds += int(waited) * 1e-6
            self.counters.graph_request_syncs += 2  # the one above, and this number's way here

    def _drain(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._wait(event)
