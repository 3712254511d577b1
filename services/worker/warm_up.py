"""Runs every kernel of the model once, so that the first request does not wait for compilers.

Compiled kernels stay on disk, so only the first start of a version takes its time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from services.worker.engine import Engine
from services.worker.model import Model, SequenceState
from shared.checkpoint.records import RecordLayout
from shared.planning.machine import available_memory, read_meminfo

COMPILER_BYTES = 1 << 30
"""One compiler's memory, with room: 0.5 GB were measured."""
SHORTEST_PIECE = 256
"""Tokens. Shorter pieces of the warm-up's prompt would save little memory and take long."""


def compile_ahead(run: Callable[[], None], progress: Callable[[str], None]) -> None:
    """`run`, with the kernels that it launches compiled before, as many at a time as this machine can.

    `run` is called twice: first in a rehearsal, which finds them with zeros in place of what kernels write. What is
    launched only because of other values is missed there, and compiled by the second call.
    """
    from kernels.rehearsal import compile_all, rehearsal  # and TileLang, which takes seconds

    progress("compiling kernels: minutes at the first start, seconds later")
    with rehearsal() as programs:
        run()
    compile_all(programs, _num_compilers(), lambda done, total: progress(f"compiling kernels: {done} of {total}"))
    run()


def _num_compilers() -> int:
    meminfo = read_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
    return max(1, min(len(os.sched_getaffinity(0)), available_memory(meminfo) // COMPILER_BYTES))


def warm_up_engine(engine: Engine) -> None:
    """Everything that a request may need of the GPU."""
    warm_up(engine.model, engine.state, max(engine.prefill_chunk, SHORTEST_PIECE))
    if engine.decoder is not None:
        engine.decoder.warm_up()


def warm_up(model: Model, state: SequenceState, chunk: int) -> None:
    """A prefill that closes groups and lets the indexer choose, a short one, and a token, on experts of zeros.

    The long prefill goes `chunk` tokens at a time, as prompts do, so that it needs no more memory than they. Leaves the
    state empty.
    """
    config = model.config
    experts = _ZeroExperts(RecordLayout.of(config).record_bytes, config.n_routed_experts, model.device)
    wanted = max(4 * (config.index_topk + 1), *config.compress_ratios)
    longest = max(1, min(wanted, state.max_context - 3))
    pieces = [min(chunk, longest - begin) for begin in range(0, longest, chunk)]
    for length in (*pieces, 2, 1):
        if state.position + length <= state.max_context:
            model.forward(state, [0] * length, experts)
    state.reset()


class _ZeroExperts:
    """Every expert is resident, and all of them are one record of zeros."""

    def __init__(self, record_bytes: int, num_experts: int, device: torch.device) -> None:
        self.wave_experts = num_experts
        self._record = torch.zeros(record_bytes, dtype=torch.uint8, device=device)

    def look_up(self, layer: int, expert_ids: Sequence[int], ahead: Sequence[int] = ()) -> _ZeroLookUp:
        return _ZeroLookUp(dict.fromkeys(expert_ids, self._record))

    def hint(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Nothing has to be read."""

    def guess(self, layer: int, choose: Callable[[], Sequence[int]]) -> None:
        choose()

    @contextmanager
    def step(self) -> Iterator[None]:
        yield


class _ZeroLookUp:
    def __init__(self, hits: Mapping[int, torch.Tensor]) -> None:
        self.hits = hits

    def wait(self) -> Mapping[int, torch.Tensor]:
        return {}

    def done(self) -> None:
        """The record stays what it is."""
