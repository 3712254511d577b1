"""What a benchmark's arrival times and counters mean: figures of each phase, the floor, tables. Pure, no I/O.

A phase is one request whose prompt is one token, so that every forward step in it is a step of one token.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from shared.planning.expectation import StepCost

Counters = Mapping[str, float]
Row = tuple[str, list[str]]


@dataclass(frozen=True, slots=True)
class Phase:
    """Times between tokens in milliseconds; shares from 0 to 1; `..._per_step` are means over forward steps.

    Messages are demands for experts; hints are counted apart. `wait_share` is the part of the time that computing stood
    still for experts. On a GPU that decodes with a graph `gpu_busy_share` is the rest of it: an upper bound, for gaps
    between kernels count as busy. Host syncs are calls that block the host until the GPU is done: a step's between the
    first and the last token, a request's before and after them. `launches_per_layer` is a mean. What only a graph has
    is None without one. `distinct_tokens` far below `tokens` tells of a model that repeats itself, and of flattering
    hits.
    """

    name: str
    tokens: int
    distinct_tokens: int
    tokens_per_s: float
    median_ms: float
    p95_ms: float
    p99_ms: float
    hit_rate: float
    late_hits_per_step: float
    misses_per_step: float
    bytes_per_step: float
    messages_per_step: float
    hints_per_step: float
    wait_share: float
    gpu_busy_share: float | None
    host_syncs_per_step: float | None
    host_syncs_per_request: float | None
    launches_per_step: float | None
    launches_per_layer: float | None
    most_launches_per_layer: float | None
    steps_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time a step can take: what it must read, over what memory delivers. Bytes, and bytes a second."""

    dense_bytes: int
    expert_bytes: int
    ceiling: float
    ceiling_from: str

    @property
    def ms(self) -> float:
        return 1000 * (self.dense_bytes + self.expert_bytes) / self.ceiling

    def ratio(self, phase: Phase) -> float:
        """How many times as long its median step takes."""
        return phase.median_ms / self.ms


@dataclass(frozen=True, slots=True)
class Run:
    """One pool size. `experts` are the backbone's; `start_s` is from the processes' start to READY.

    Prefill is of one prompt of `prefill_tokens`, with a warm pool.
    """

    slots: int
    experts: int
    start_s: float
    phases: tuple[Phase, ...]
    prefill_tokens: int
    prefill_tokens_per_s: float

    @property
    def cached(self) -> float:
        return min(1.0, self.slots / self.experts)


def phase(name: str, ids: Sequence[int], times: Sequence[float], before: Counters, after: Counters) -> Phase:
    """Figures of at least two tokens that arrived at `times` (seconds), from the counters around them."""

    def gained(key: str) -> float:
        return after.get(key, 0.0) - before.get(key, 0.0)

    elapsed = times[-1] - times[0]
    steps_ms = tuple(1000 * (later - earlier) for earlier, later in itertools.pairwise(times))
    # One forward for the prompt's only token, then one for every token but the last, which only leaves.
    steps, uses = len(ids), gained("uses")
    has_graph = "graph_steps" in after
    if has_graph:
        waiting = gained("graph_wait_seconds") / elapsed
    else:
        waiting = gained("wait_seconds") / (gained("prefill_seconds") + gained("decode_seconds"))
    return Phase(
        name=name,
        tokens=len(ids),
        distinct_tokens=len(set(ids)),
        tokens_per_s=len(steps_ms) / elapsed,
        median_ms=statistics.median(steps_ms),
        p95_ms=percentile(steps_ms, 0.95),
        p99_ms=percentile(steps_ms, 0.99),
        hit_rate=1 - (gained("misses") + gained("late_hits")) / uses,
        late_hits_per_step=gained("late_hits") / steps,
        misses_per_step=gained("misses") / steps,
        bytes_per_step=gained("bytes_read") / steps,
        messages_per_step=gained("fetch_messages") / steps,
        hints_per_step=gained("hint_messages") / steps,
        wait_share=waiting,
        gpu_busy_share=1 - waiting if has_graph else None,
        host_syncs_per_step=gained("graph_step_syncs") / steps if has_graph else None,
        host_syncs_per_request=gained("graph_request_syncs") if has_graph else None,
        launches_per_step=after["graph_launches_per_step"] if has_graph else None,
        launches_per_layer=after["graph_launches_per_layer"] if has_graph else None,
        most_launches_per_layer=after["graph_most_launches_per_layer"] if has_graph else None,
        steps_ms=steps_ms,
    )


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -int(-part * len(ordered) // 1)  # rounded up
    return ordered[max(rank, 1) - 1]


def floor_of(cost: StepCost, ceiling: float, ceiling_from: str) -> Floor | None:
    """None if the bandwidth is unknown (0)."""
    if not ceiling:
        return None
    return Floor(cost.dense_bytes, cost.uses * cost.record_bytes, ceiling, ceiling_from)


def phases_table(run: Run, floor: Floor | None) -> Table:
    """One pool size, its phases side by side."""
    title = f"Pool of {run.slots:,} slots for {run.experts:,} experts ({run.cached:.0%})"
    names = [f"{each.name}, {each.tokens} tokens" for each in run.phases]
    return _table(title, ["", *names], _rows(run.phases, floor))


def fractions_table(runs: Sequence[Run], floor: Floor | None) -> Table:
    """The last phase by pool size."""
    last = [run.phases[-1] for run in runs]
    return _table(f"By pool size, {last[0].name}", ["", *(f"{run.cached:.0%}" for run in runs)], _rows(last, floor))


def _rows(phases: Sequence[Phase], floor: Floor | None) -> list[Row]:
    def row(title: str, *cells: str) -> Row:
        return title, list(cells)

    rows = [
        row("tokens/s", *(f"{p.tokens_per_s:.2f}" for p in phases)),
        row("ms a step, median", *(f"{p.median_ms:.2f}" for p in phases)),
        row("  p95", *(f"{p.p95_ms:.2f}" for p in phases)),
        row("  p99", *(f"{p.p99_ms:.2f}" for p in phases)),
        row("hits, of expert uses", *(f"{p.hit_rate:.1%}" for p in phases)),
        row("late hits a step", *(f"{p.late_hits_per_step:.2f}" for p in phases)),
        row("misses a step", *(f"{p.misses_per_step:.2f}" for p in phases)),
        row("read a step", *(f"{p.bytes_per_step / 1e6:.2f} MB" for p in phases)),
        row("messages to expertd a step", *(f"{p.messages_per_step:.2f}" for p in phases)),
        row("  hints", *(f"{p.hints_per_step:.2f}" for p in phases)),
        row("time in waits", *(f"{p.wait_share:.1%}" for p in phases)),
    ]
    if all(p.gpu_busy_share is not None for p in phases):
        rows.append(row("GPU busy (1 - waits / elapsed)", *(f"{p.gpu_busy_share:.1%}" for p in phases)))
        rows.append(row("host syncs a step", *(f"{p.host_syncs_per_step:.3f}" for p in phases)))
        rows.append(row("  at start and end", *(f"{p.host_syncs_per_request:.0f}" for p in phases)))
        rows.append(row("launches a step", *(f"{p.launches_per_step:.0f}" for p in phases)))
        per_layer = (f"{p.launches_per_layer:.1f}, at most {p.most_launches_per_layer:.0f}" for p in phases)
        rows.append(row("  a layer", *per_layer))
    if floor:
        rows.append(row("median / floor", *(f"{floor.ratio(p):.2f} x" for p in phases)))
    rows.append(row("distinct tokens", *(f"{p.distinct_tokens} of {p.tokens}" for p in phases)))
    return rows


def _table(title: str, headings: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for name, cells in rows:
        table.add_row(name, *cells)
    return table
