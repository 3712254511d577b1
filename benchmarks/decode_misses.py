"""What misses cost a decode step with 60 % of the experts in the pool, beside what the disk and the bus say they must.

    python -m benchmarks.decode_misses DIR

DIR holds the slice that `benchmarks.full_width` makes. The model: a step takes what it takes when everything is there,
and for each miss one record's read, its copy to the GPU and 0.15 ms. All of it is measured on this machine in this run.
Misses of one layer are asked for at once and may be read side by side, which the model does not know.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_slice import Slice, Step, decoding
from benchmarks.report import save
from services.cli.bench_figures import percentile
from shared.checkpoint.direct_reader import DirectReader, Span, window_bytes
from shared.memory.io_buffer import io_buffer

CACHED = 0.6
TOKENS = 1000
SEED = 1
OVERHEAD_MS = 0.15
"""What the model allows for noticing, asking and answering."""
ALONE = 32
"""Records read and copied by themselves; so many fetches of each number of experts."""
TOGETHER = (1, 2, 6)
"""Experts of one layer that are asked for at once."""
REPEATS, REPEATED = 4, 24
"""A short answer, and how often it is given: from the second time on nearly everything it needs is there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the cold and of the warm answer")
    args = parser.parse_args()
    save("decode_misses", measure(args.directory, args.tokens))


def measure(checkpoint: Path, tokens: int = TOKENS) -> dict[str, Any]:
    """Prints tables; returns what is in them."""
    with decoding(checkpoint, CACHED) as own:
        reads_ms, copy_ms = _reads_ms(own), _copy_ms(own)
        fetch_ms = {count: _fetch_ms(own, count) for count in TOGETHER}
        own.steps(SEED, tokens)
        steps, reads = counted(own, SEED + 1, tokens)
        reads_ms += _reads_ms(own)  # a drive has its moods
        again = [step for _ in range(REPEATS) for step in own.steps(SEED + 2, REPEATED)]
    read_ms = statistics.median(reads_ms)
    hits = [step.ms for step in (*again, *steps) if not step.misses]
    assert hits, "some steps of an answer given again find everything resident"
    figures = {"cached": CACHED, "read_ms": read_ms, "copy_ms": copy_ms, "fetch_ms": fetch_ms, "reads": reads}
    figures |= comparison(steps, statistics.median(hits), read_ms + copy_ms + OVERHEAD_MS)
    _show(figures)
    return figures


def counted(own: Slice, seed: int, tokens: int) -> tuple[list[Step], dict[str, int]]:
    """The steps of an answer, and of `Slice.counts` what they added."""
    before = own.counts()
    steps = own.steps(seed, tokens)
    return steps, {name: count - before[name] for name, count in own.counts().items()}


def _reads_ms(own: Slice) -> list[float]:
    """What records take by O_DIRECT, one at a time, to memory of the host."""
    draws = random.Random(0)
    buffer = io_buffer(window_bytes(2 * own.records.layout.slot_bytes))
    times = []
    for _ in range(ALONE):
        layer, expert = draws.randrange(own.config.num_hidden_layers), draws.randrange(own.config.n_routed_experts)
        extents = own.records.plan(layer, expert).extents
        files = [DirectReader(extent.file) for extent in extents]
        started = time.perf_counter()
        for file, extent in zip(files, extents, strict=True):
            file.read(Span(extent.offset, extent.nbytes), buffer).release()
        times.append(1e3 * (time.perf_counter() - started))
        for file in files:
            file.close()
    return times


def _copy_ms(own: Slice) -> float:
    """The median time of one record from pinned memory to the GPU, seen to be complete."""
    source = torch.zeros(own.records.layout.record_bytes, dtype=torch.uint8).pin_memory()
    target = source.to("cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return _median_ms(copy, ALONE)


def _fetch_ms(own: Slice, count: int) -> float:
    """The median time in which expertd answers a request for so many experts of one layer, none of them there."""
    draws = random.Random(count)
    experts, table = own.experts, own.experts.control.slot_table

    def fetch() -> None:
        layer = draws.randrange(own.config.num_hidden_layers)
        absent = np.flatnonzero(table[layer] < 0).tolist()
        with experts.step():
            look_up = experts.look_up(layer, sorted(draws.sample(absent, count)))
            assert len(look_up.wait()) == count
            look_up.done()

    return _median_ms(fetch, ALONE)


def _median_ms(work: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def comparison(steps: Sequence[Step], hit_ms: float, miss_ms: float) -> dict[str, Any]:
    """Steps as measured beside `hit_ms` and `miss_ms` a miss; what a layer's misses cost by their number, fitted."""
    measured = [step.ms for step in steps]
    expected = [hit_ms + step.misses * miss_ms for step in steps]
    return {
        "steps": len(steps),
        "misses_per_step": statistics.mean(step.misses for step in steps),
        "hit_ms": hit_ms,
        "miss_ms": miss_ms,
        "measured_ms": _spread(measured),
        "expected_ms": _spread(expected),
        "measured_over_expected": sum(measured) / sum(expected),
        "step_over_its_expectation": _spread([a / b for a, b in zip(measured, expected, strict=True)]),
        "layer_ms": layer_cost_ms(steps, hit_ms),
        "by_misses": by_misses(steps, hit_ms, miss_ms),
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


def by_misses(steps: Sequence[Step], hit_ms: float, miss_ms: float) -> list[dict[str, float]]:
    """Steps with the same number of misses together."""
    rows = []
    for misses in sorted({step.misses for step in steps}):
        own = [step.ms for step in steps if step.misses == misses]
        median = statistics.median(own)
        rows.append(
            {"misses": misses, "steps": len(own), "median_ms": median, "expected_ms": hit_ms + misses * miss_ms}
        )
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
    fetches = ", ".join(f"{count}: {ms:.2f}" for count, ms in figures["fetch_ms"].items())
    layers = ", ".join(f"{count}: {ms:.2f}" for count, ms in figures["layer_ms"].items())
    measured, expected, reads = figures["measured_ms"], figures["expected_ms"], figures["reads"]
    console.print(
        f"a record: read {figures['read_ms']:.2f} ms, copy {figures['copy_ms']:.2f} ms; "
        f"expected of a miss {figures['miss_ms']:.2f} ms, of a step that hits {figures['hit_ms']:.2f} ms\n"
        f"expertd, ms for so many experts of one layer: {fetches}\n"
        f"a layer that misses, ms for so many, fitted to {figures['steps']} steps: {layers}\n"
        f"read ahead in these steps: {reads['prefetched']} (hinted at {reads['hinted']}; guessed {reads['guessed']}, "
        f"wrong {reads['guessed'] - reads['guessed_right']}); missed {reads['misses']}, late {reads['late_hits']}\n"
        f"steps: mean {measured['mean']:.2f} ms, p99 {measured['p99']:.2f}; expected {expected['mean']:.2f}, "
        f"p99 {expected['p99']:.2f}; {figures['measured_over_expected']:.2f} of what was expected"
    )


if __name__ == "__main__":
    main()
