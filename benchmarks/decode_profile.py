"""Every kernel of a decode step in the real graph, all experts resident: its time, its bytes, and how near the ceiling.

    python -m benchmarks.decode_profile DIR

DIR holds the slice that `benchmarks.full_width` makes. The profiler sees kernels inside replays. Kernels may overlap,
the next one's start with this one's end, so a kernel's time is from when those before it ended, or from its own start
if that is later; what lies between is a gap. Times and gaps add up to the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.decode_launches import OUTSIDE, Launch, step_launches
from benchmarks.decode_slice import Slice, decoding
from benchmarks.kernels_decode import ceiling
from benchmarks.report import save
from services.worker.decode.extent import FIRST_EXTENT, Extent

SEED = 1
TOKENS = 600
PROFILED = (400, 440)
"""Tokens that the profiler sees."""
NAMED = 0.05
"""Every kernel above this part of the step gets a line of its own."""


class Event(NamedTuple):
    """A kernel that ran; microseconds."""

    name: str
    start: float
    end: float


class Timed(NamedTuple):
    """Microseconds of one launch, and of the gap before it."""

    us: float
    gap_us: float


@dataclass(frozen=True, slots=True)
class Row:
    """All launches of one name in a step. `share` is of its kernels and gaps, `ratio` of the ceiling for reads."""

    name: str
    kernel: str
    launches: int
    us: float
    gap_us: float
    share: float
    mb: float
    tb_s: float
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    bytes_per_s = ceiling()
    torch.cuda.empty_cache()
    save("decode_profile", measure(args.directory, bytes_per_s))


def measure(checkpoint: Path, bytes_per_s: float) -> dict[str, Any]:
    """Prints a table; returns everything in it. `bytes_per_s` is the ceiling for reads."""
    with decoding(checkpoint, cached=1.0) as own:
        own.steps(SEED, TOKENS)
        again = own.steps(SEED, TOKENS)
        assert not any(step.misses for step in again), "what was asked before is resident"
        wall_us = 1e3 * statistics.median(step.ms for step in again[slice(*PROFILED)])
        timed = _profiled(own)
        config = own.config
    figures = summary(config.num_hidden_layers, *timed, wall_us=wall_us, bytes_per_s=bytes_per_s)
    _show(figures)
    return figures


def _profiled(own: Slice) -> tuple[list[Launch], list[Timed]]:
    begin, end = PROFILED
    launches = step_launches(own.config, Extent(FIRST_EXTENT), (begin + end) // 2)
    with own.answer(SEED, TOKENS) as ids:
        _take(ids, begin)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            _take(ids, end - begin)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    return launches, median_of_steps(kernels_of(trace["traceEvents"]), [launch.kernel for launch in launches])


def _take(ids: Iterator[int], number: int) -> None:
    assert len(list(islice(ids, number))) == number


def kernels_of(trace: Sequence[dict[str, Any]]) -> list[Event]:
    """Of a Chrome trace of the profiler's, in the order of their starts."""
    found = [e for e in trace if e.get("cat") == "kernel"]
    return sorted((Event(e["name"], e["ts"], e["ts"] + e["dur"]) for e in found), key=lambda event: event.start)


def median_of_steps(events: Sequence[Event], names: Sequence[str]) -> list[Timed]:
    """Of each launch over all whole steps; a step begins with the first of `names`.

    Raises:
        ValueError: no step, or one with other kernels than `names`.
    """
    starts = [i for i, event in enumerate(events) if event.name == names[0]]
    steps = []
    for begin, end in pairwise(starts):
        own = events[begin:end]
        if [event.name for event in own] != list(names):
            wrong = [(i, a, b.name) for i, (a, b) in enumerate(zip(names, own, strict=False)) if a != b.name]
            raise ValueError(f"a step of {len(own)} kernels, not {len(names)}; the first that differ: {wrong[:3]}")
        first = events[begin - 1].end if begin else own[0].start
        ended = accumulate((event.end for event in own[:-1]), max, initial=first)
        steps.append([_timed(event, last) for event, last in zip(own, ended, strict=True)])
    if not steps:
        raise ValueError(f"no whole step among {len(events)} kernels; the first are {[e.name for e in events[:5]]}")
    return [
        Timed(statistics.median(t.us for t in column), statistics.median(t.gap_us for t in column))
        for column in zip(*steps, strict=True)
    ]


def _timed(event: Event, last_end: float) -> Timed:
    return Timed(max(0.0, event.end - max(event.start, last_end)), max(0.0, event.start - last_end))


def summary(
    layers: int, launches: Sequence[Launch], timed: Sequence[Timed], *, wall_us: float, bytes_per_s: float
) -> dict[str, Any]:
    """Rows by name, the longest first, and what the step is made of. `wall_us` is a step's time without profiler."""
    total = sum(t.us + t.gap_us for t in timed)
    rows = []
    for name in dict.fromkeys(launch.name for launch in launches):
        own = [(launch, t) for launch, t in zip(launches, timed, strict=True) if launch.name == name]
        us, gap_us = sum(t.us for _, t in own), sum(t.gap_us for _, t in own)
        nbytes = sum(launch.nbytes for launch, _ in own)
        per_s = nbytes / us * 1e6 if us else 0.0
        rates = nbytes / 1e6, per_s / 1e12, per_s / bytes_per_s
        rows.append(Row(name, own[0][0].kernel, len(own), us, gap_us, us / total, *rates))
    outside = {
        part: sum(t.us + t.gap_us for launch, t in zip(launches, timed, strict=True) if launch.part == part)
        for part in OUTSIDE
    }
    nbytes = sum(launch.nbytes for launch in launches)
    return {
        "ceiling_tb_s": bytes_per_s / 1e12,
        "layers": layers,
        "launches": len(launches),
        "wall_us": wall_us,
        "kernels_us": sum(t.us for t in timed),
        "gaps_us": sum(t.gap_us for t in timed),
        "outside_us": outside,
        "ms_per_layer": wall_us / layers / 1e3,
        "ms_per_layer_without_start_head_sampling": (wall_us - sum(outside.values())) / layers / 1e3,
        "step_mb": nbytes / 1e6,
        "step_ratio": nbytes / wall_us * 1e6 / bytes_per_s,
        "kernels": [asdict(row) for row in sorted(rows, key=lambda row: -row.us)],
    }


def _show(figures: dict[str, Any]) -> None:
    table = Table(title=f"Kernels of a step of {figures['layers']} layers, ceiling {figures['ceiling_tb_s']:.2f} TB/s")
    for number, heading in enumerate(["", "launches", "us a step", "share", "MB", "TB/s", "of the ceiling"]):
        table.add_column(heading, justify="right" if number else "left")
    for row in figures["kernels"]:
        style = "bold" if row["share"] > NAMED else None
        ratio = f"{row['ratio']:.0%}" if row["mb"] > 1 else "-"
        cells = [f"{row['launches']}", f"{row['us']:.1f}", f"{row['share']:.1%}", f"{row['mb']:.1f}"]
        table.add_row(f"{row['name']} ({row['kernel']})", *cells, f"{row['tb_s']:.2f}", ratio, style=style)
    console = Console(width=140)
    console.print(table)
    outside = figures["outside_us"]
    console.print(
        f"step without profiler {figures['wall_us']:.1f} us, {figures['step_ratio']:.0%} of the ceiling over all; "
        f"with it {figures['kernels_us']:.1f} us in kernels and {figures['gaps_us']:.1f} us in gaps\n"
        f"a layer: {figures['ms_per_layer']:.4f} ms of the whole step; "
        f"{figures['ms_per_layer_without_start_head_sampling']:.4f} ms without "
        + ", ".join(f"{part} {us:.1f} us" for part, us in outside.items())
    )


if __name__ == "__main__":
    main()
