"""A worker's engine in this process, with a real expertd behind it: what a benchmark sees step by step.

The same classes as in the worker, without its socket, so that every ticket can be noted.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.worker.engine import Engine, Job
from services.worker.experts import ExpertCounters, SharedExperts
from services.worker.model import Model
from services.worker.sampler import SamplingParams
from services.worker.warm_up import compile_ahead, warm_up_engine
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import ExpertRecords
from shared.config import PrefetchConfig
from shared.runtime.boot import make_identity
from shared.stats import StatsSubscriber
from shared.transport.client import BlockingClient
from tests.helpers.services import running, write_config

CONTEXT = 8192
THREADS = 8
"""Records that expertd reads at a time."""


class Ticket(NamedTuple):
    """Experts of one layer that a step found missing, by the clock of the look-up."""

    clock: int
    missing: int


class Step(NamedTuple):
    """One forward pass: milliseconds from token to token, and what each of its tickets missed."""

    ms: float
    missing: tuple[int, ...]

    @property
    def misses(self) -> int:
        return sum(self.missing)


class NotedExperts(SharedExperts):
    """Notes what the GPU asks for on its way to expertd."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tickets: list[Ticket] = []
        self.hinted = 0

    def ask(self, layer: int, expert_ids: tuple[int, ...], held_slots: tuple[int, ...], clock: int) -> None:
        self.tickets.append(Ticket(clock, len(expert_ids)))
        super().ask(layer, expert_ids, held_slots, clock)

    def pass_hint(self, layer: int, expert_ids: tuple[int, ...], is_guess: bool = False) -> None:
        self.hinted += 0 if is_guess else len(expert_ids)
        super().pass_hint(layer, expert_ids, is_guess)


class Slice:
    """A model whose experts are expertd's; one sequence at a time."""

    def __init__(
        self, engine: Engine, experts: NotedExperts, counters: ExpertCounters, records: ExpertRecords, stats: str
    ) -> None:
        self.engine = engine
        self.experts = experts
        self.records = records
        self.config = engine.model.config
        self._counters = counters
        self._stats = stats

    @contextmanager
    def answer(self, seed: int, tokens: int) -> Iterator[Iterator[int]]:
        """To a prompt of one token. Sampled, for greedy answers of random weights soon repeat themselves."""
        prompt = [random.Random(seed).randrange(self.config.vocab_size)]
        job = Job(prompt, tokens, SamplingParams(temperature=1.0, seed=seed))
        with closing(self.engine.generate(job, self.experts, lambda: False)) as steps:
            yield (step.token for step in steps if step.token is not None)

    def steps(self, seed: int, tokens: int) -> list[Step]:
        """Those of a whole answer."""
        self.experts.tickets.clear()
        with self.answer(seed, tokens) as ids:
            times = [time.perf_counter() for _ in ids]
        return steps_of(times, self.experts.tickets, self.experts.control.worker_clock, self.config.num_hidden_layers)

    def counts(self) -> dict[str, int]:
        """Cumulative, in experts: what expertd read and was asked for, what was hinted at, guessed, guessed right."""
        with closing(StatsSubscriber([self._stats])) as stats:
            snapshot = stats.poll(10.0)
        assert snapshot is not None, "expertd publishes what it counts"
        read = {name: int(snapshot.values[name]) for name in ("misses", "late_hits", "prefetched")}
        guessed, right = self._counters.guessed, self._counters.guessed_right
        return read | {"hinted": self.experts.hinted, "guessed": guessed, "guessed_right": right}


def steps_of(times: Sequence[float], tickets: Sequence[Ticket], end: int, layers: int) -> list[Step]:
    """Tokens' arrivals, in seconds, and tickets as steps. The clock, up by one a layer, was `end` after the last."""
    begin = end - layers * (len(times) - 1)
    missing: list[list[int]] = [[] for _ in times[1:]]
    for ticket in tickets:
        missing[(ticket.clock - begin) // layers].append(ticket.missing)
    return [Step(1e3 * (times[i + 1] - times[i]), tuple(each)) for i, each in enumerate(missing)]


@contextmanager
def decoding(checkpoint: Path, cached: float, device: str = "cuda") -> Iterator[Slice]:
    """With a pool for this part of the backbone's experts, empty at first. On a CPU nothing writes tickets."""
    config, index = ModelConfig.from_dir(checkpoint), TensorIndex.open(checkpoint)
    records = ExpertRecords(index, config)
    slots = round(cached * config.num_hidden_layers * config.n_routed_experts)
    engine = Engine(Model.load(index, config, CONTEXT, device=torch.device(device)), CONTEXT, prefill_chunk=512)
    if device != "cpu":
        compile_ahead(lambda: warm_up_engine(engine), lambda progress: None)
    with tempfile.TemporaryDirectory() as name:
        path = write_config(
            Path(name) / "icebox.toml",
            checkpoint,
            cache={"bytes": slots * records.layout.slot_bytes},
            model={"max_context": CONTEXT},
            reader={"threads": THREADS},
            worker={"device": device},
        )
        with running(path, "expertd") as stack:
            client = BlockingClient(stack.config.endpoint("expertd"), make_identity("benchmark"))
            with closing(client):
                client.connect(10.0)
                counters = ExpertCounters()
                experts = NotedExperts.open(
                    client,
                    fingerprint=index.fingerprint,
                    device=device,
                    record_bytes=records.layout.record_bytes,
                    prefetch=PrefetchConfig(),
                    counters=counters,
                )
                with closing(experts):
                    engine.bind(experts)
                    try:
                        yield Slice(engine, experts, counters, records, stack.config.endpoint("expertd.stats"))
                    finally:
                        engine.release()
