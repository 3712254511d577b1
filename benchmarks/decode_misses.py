"""What misses cost a decode step with 60 % of the experts in the pool, beside what the disk and the bus say they must.

    python -m benchmarks.decode_misses DIR

DIR holds the slice that `benchmarks.full_width` makes. The model: a step takes what it takes when everything is there,
and for each miss one record's read, its copy to the GPU and 0.15 ms. All of it is measured on this machine in this run,
reads again before every few steps, because a drive has its moods. Misses of one layer are asked for at once and may be
read side by side, which the model does not know. A miss is what a look-up did not find. Steps are compared with all
records read for them, too: a hinted one that came in time was no miss, but it kept the drive from others.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_slice import Slice, Step, decoding
from benchmarks.report import save
from services.cli.bench_figures import percentile
from shared.checkpoint.direct_reader import DirectReader, Span, window_bytes
from shared.checkpoint.records import ReadPlan
from shared.memory.io_buffer import io_buffer

CACHED = 0.6
TOKENS = 1000
SEED = 1
OVERHEAD_MS = 0.15
"""What the model allows for noticing, asking and answering."""
ALONE = 32
"""Records read and copied by themselves; so many fetches of each number of experts."""
PIECE, READS = 25, 8
"""Steps of one answer, and how many records are read by themselves before it."""
TOGETHER = (1, 2, 6)
"""Experts of one layer that are asked for at once, and records that are read side by side."""
REPEATS, REPEATED = 4, 24
"""A short answer, and how often it is given: from the second time on nearly everything it needs is there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the cold and of the warm answer")
    args = parser.parse_args()
    save("decode_misses", measure(args.directory, args.tokens))


class Judged(NamedTuple):
    """A step beside what the model makes of its misses."""

    step: Step
    expected_ms: float


class Piece(NamedTuple):
    """A few steps, and what a record's read took just before them."""

    read_ms: float
    steps: list[Step]

    def judged(self, hit_ms: float, beside_ms: float) -> list[Judged]:
        """`beside_ms` is what a miss may cost beside its read."""
        return [Judged(step, hit_ms + step.misses * (self.read_ms + beside_ms)) for step in self.steps]


class Alone:
    """Records that are read, or asked for, with nothing beside them. Times in milliseconds."""

    def __init__(self, own: Slice) -> None:
        self._own = own
        self._draws = random.Random(SEED)
        size = window_bytes(2 * own.records.layout.slot_bytes)
        self._buffers = [io_buffer(size) for _ in range(max(TOGETHER))]

    def read_ms(self, count: int = 1) -> float:
        """So many records by O_DIRECT to memory of the host, side by side."""
        plans = [self._own.records.plan(*self._any()) for _ in range(count)]
        with ExitStack() as opened:
            files = {extent.file for plan in plans for extent in plan.extents}
            readers = {file: opened.enter_context(DirectReader(file)) for file in files}
            pool = opened.enter_context(ThreadPoolExecutor(count))

            def read(plan: ReadPlan, buffer: memoryview) -> None:
                for extent in plan.extents:
                    readers[extent.file].read(Span(extent.offset, extent.nbytes), buffer).release()

            started = time.perf_counter()
            others = pool.map(read, plans[1:], self._buffers[1:])  # one alone is not to wait for a thread
            read(plans[0], self._buffers[0])
            list(others)
            return 1e3 * (time.perf_counter() - started)

    def fetch_ms(self, count: int) -> float:
        """expertd's answer to a request for so many experts of one layer, none of them there."""
        experts = self._own.experts
        is_absent = experts.control.slot_table < 0
        layer = self._draws.choice(np.flatnonzero(is_absent.sum(axis=1) >= count).tolist())
        absent = np.flatnonzero(is_absent[layer]).tolist()
        started = time.perf_counter()
        with experts.step():
            look_up = experts.look_up(layer, sorted(self._draws.sample(absent, count)))
            assert len(look_up.wait()) == count
            look_up.done()
        return 1e3 * (time.perf_counter() - started)

    def medians(self) -> dict[str, float]:
        """Of plain reads, and of requests for as many experts, in turn."""
        measures = {f"read {count}": partial(self.read_ms, count) for count in TOGETHER}
        measures |= {f"fetch {count}": partial(self.fetch_ms, count) for count in TOGETHER}
        rounds = [{name: measure() for name, measure in measures.items()} for _ in range(ALONE)]
        return {name: statistics.median(each[name] for each in rounds) for name in measures}

    def _any(self) -> tuple[int, int]:
        config = self._own.config
        return self._draws.randrange(config.num_hidden_layers), self._draws.randrange(config.n_routed_experts)


def measure(checkpoint: Path, tokens: int = TOKENS) -> dict[str, Any]:
    """Prints tables; returns what is in them."""
    with decoding(checkpoint, CACHED) as own:
        alone, copy_ms = Alone(own), _copy_ms(own)
        alone_ms = alone.medians()
        own.steps(SEED, tokens)
        counts = own.counts()
        pieces = list(_pieces(own, alone, tokens))
        reads = {name: count - counts[name] for name, count in own.counts().items()}
        again = [step for _ in range(REPEATS) for step in own.steps(SEED, REPEATED)]
    hits = [step.ms for step in (*again, *(step for piece in pieces for step in piece.steps)) if not step.misses]
    assert hits, "some steps of an answer given again find everything resident"
    hit_ms = statistics.median(hits)
    judged = [each for piece in pieces for each in piece.judged(hit_ms, copy_ms + OVERHEAD_MS)]
    figures = {"cached": CACHED, "alone_ms": alone_ms, "copy_ms": copy_ms, "reads": reads}
    figures |= {"read_ms": _spread([piece.read_ms for piece in pieces])}
    figures |= comparison(judged, hit_ms, records=reads["misses"] + reads["prefetched"])
    _show(figures)
    return figures


def _pieces(own: Slice, alone: Alone, tokens: int) -> Iterator[Piece]:
    for number in range(-(-tokens // PIECE)):
        read_ms = statistics.median(alone.read_ms() for _ in range(READS))
        yield Piece(read_ms, own.steps(SEED + 1 + number, PIECE))


def _copy_ms(own: Slice) -> float:
    """The median time of one record from pinned memory to the GPU, seen to be complete."""
    source = torch.zeros(own.records.layout.record_bytes, dtype=torch.uint8).pin_memory()
    target = source.to("cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    times = []
    for _ in range(ALONE):
        started = time.perf_counter()
        copy()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def comparison(judged: Sequence[Judged], hit_ms: float, records: int) -> dict[str, Any]:
    """Steps beside what was expected of them; what a layer's misses cost by their number, fitted.

    `records` were read for these steps; each is to cost what a miss costs in the mean.
    """
    steps = [each.step for each in judged]
    measured, expected = [step.ms for step in steps], [each.expected_ms for each in judged]
    misses, hits_ms = sum(step.misses for step in steps), len(steps) * hit_ms
    return {
        "steps": len(steps),
        "misses_per_step": misses / len(steps),
        "records_per_step": records / len(steps),
        "hit_ms": hit_ms,
        "measured_ms": _spread(measured),
        "expected_ms": _spread(expected),
        "measured_over_expected": sum(measured) / sum(expected),
        "measured_over_records": sum(measured) / (hits_ms + records * (sum(expected) - hits_ms) / max(1, misses)),
        "step_over_its_expectation": _spread([a / b for a, b in zip(measured, expected, strict=True)]),
        "layer_ms": layer_cost_ms(steps, hit_ms),
        "by_misses": by_misses(judged),
    }


def layer_cost_ms(steps: Sequence[Step], hit_ms: float) -> dict[int, float]:
    """{misses: milliseconds} that a layer with so many adds to its step: least squares over all steps.

    Numbers of misses that fewer than ten layers had are left out, and the steps with them.
    """
    counts = [each for step in steps for each in step.missing]
    kinds = sorted(each for each in set(counts) if counts.count(each) >= 10)
    kept = [step for step in steps if set(step.missing) <= set(kinds)]
    if not kinds or not kept:
        return {}
    numbers = np.array([[step.missing.count(kind) for kind in kinds] for step in kept], dtype=float)
    over = np.array([step.ms - hit_ms for step in kept])
    costs, *_ = np.linalg.lstsq(numbers, over, rcond=None)
    return dict(zip(kinds, costs.tolist(), strict=True))


def by_misses(judged: Sequence[Judged]) -> list[dict[str, float]]:
    """Steps with the same number of misses together."""
    rows = []
    for misses in sorted({each.step.misses for each in judged}):
        own = [each for each in judged if each.step.misses == misses]
        measured_ms = statistics.median(each.step.ms for each in own)
        expected_ms = statistics.median(each.expected_ms for each in own)
        rows.append({"misses": misses, "steps": len(own), "median_ms": measured_ms, "expected_ms": expected_ms})
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    parts = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {"mean": statistics.mean(values)} | {name: percentile(values, part) for name, part in parts.items()}


def _show(figures: dict[str, Any]) -> None:
    table = Table(title=f"Steps with {figures['cached']:.0%} of the experts in the pool, by their misses")
    for heading in ("misses", "steps", "median ms", "expected ms", "measured / expected"):
        table.add_column(heading, justify="right")
    for row in figures["by_misses"]:
        ratio = row["median_ms"] / row["expected_ms"]
        cells = f"{row['misses']}", f"{row['steps']}", f"{row['median_ms']:.2f}", f"{row['expected_ms']:.2f}"
        table.add_row(*cells, f"{ratio:.2f}")
    console = Console(width=120, highlight=False)
    console.print(table)
    alone = ", ".join(f"{name}: {ms:.2f}" for name, ms in figures["alone_ms"].items())
    layers = ", ".join(f"{count}: {ms:.2f}" for count, ms in figures["layer_ms"].items())
    measured, expected, reads = figures["measured_ms"], figures["expected_ms"], figures["reads"]
    console.print(
        f"a record: read {figures['read_ms']['mean']:.2f} ms, copy {figures['copy_ms']:.2f} ms; "
        f"a step that hits {figures['hit_ms']:.2f} ms\n"
        f"in turn, ms for so many records, read plainly side by side or asked of expertd: {alone}\n"
        f"a layer that misses, ms for so many, fitted to {figures['steps']} steps: {layers}\n"
        f"read ahead in these steps: {reads['prefetched']} (hinted at {reads['hinted']}; guessed {reads['guessed']}, "
        f"wrong {reads['guessed'] - reads['guessed_right']}); missed {reads['misses']}, late {reads['late_hits']}\n"
        f"steps: mean {measured['mean']:.2f} ms, p99 {measured['p99']:.2f}; expected {expected['mean']:.2f}, "
        f"p99 {expected['p99']:.2f}; {figures['measured_over_expected']:.2f} of what was expected of their "
        f"{figures['misses_per_step']:.1f} misses, {figures['measured_over_records']:.2f} of the "
        f"{figures['records_per_step']:.1f} records read for them"
    )


if __name__ == "__main__":
    main()
