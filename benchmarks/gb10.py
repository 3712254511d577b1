"""What to expect of a DGX Spark's GB10 for the whole model, from kernels measured elsewhere; nothing is run on one.

    python -m benchmarks.gb10

Reads `results/decode_profile.json`, which `benchmarks.full_width` leaves where it runs on a GPU; kernels and gaps are
scaled to add up to the step's time without a profiler. A step that hits must read what the plan says
(`shared.planning`) at GB10's bandwidth; that is its floor. What comes on top has two estimates:

* the same time lost: every launch loses as many microseconds to latencies and gaps as it did where it was measured;
* the same ratio: every kernel reaches the same part of the ceiling as there; those that read next to nothing take the
  same time. Large kernels lose much less on slower memory, so this is the cautious end.

A miss then costs one record's read, its copy and 0.15 ms, one after the other, none hidden: the model that
`benchmarks.decode_misses` compares with what it measures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.decode_launches import step_launches
from benchmarks.decode_misses import OVERHEAD_MS
from benchmarks.decode_profile import PROFILED
from benchmarks.report import RESULTS, save
from services.worker.decode.extent import FIRST_EXTENT, Extent
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.synth_shapes import published_config
from shared.config import load_config
from shared.planning.expectation import Range, StepCost, tokens_per_s
from shared.planning.machine import load_machine
from shared.planning.plan import make_plan

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
HITS = (0.90, 0.96, 1.0)
COPY_BYTES_PER_S = 59e9
"""From pinned memory to the GPU's on a GB10, as reported."""
SMALL_MB = 1.0
"""Launches of a name that read less take time by latency alone."""


class Published(NamedTuple):
    """One DGX Spark, this model with all its experts as published, on NVMe; not measured by us."""

    engine: str
    tokens_per_s: str
    conditions: str
    source: str


PUBLISHED = (
    Published("SparkLab", "11.02", "no reads, 128 tokens", "sparklab, GB10-DSV4-PREFIX-006"),
    Published("SparkLab", "8.67", "98 % hits, 256 tokens", "sparklab, GB10-DSV4-RESIDENCY-003"),
    Published("SparkLab, speculating with DSpark", "14.02", "no reads, 128 tokens", "sparklab, GB10-DSV4-PREFIX-006"),
    Published("ds4 with an LRU", "2.96", "81 % hits", "https://github.com/antirez/ds4/issues/639"),
)


@dataclass(frozen=True, slots=True)
class Kernels:
    """All launches of one name in the measured step."""

    launches: int
    us: float
    gap_us: float
    mb: float
    ratio: float

    def lost_us(self, ceiling_tb_s: float) -> float:
        """Of one launch, on top of what its bytes take at the ceiling."""
        return max(0.0, self.us - self.mb / ceiling_tb_s + self.gap_us) / self.launches

    def same_ratio_us(self, bytes_per_s: float) -> float:
        """Of one launch, where memory gives so much."""
        busy_us = self.us if self.mb < SMALL_MB else self.mb * 1e12 / bytes_per_s / min(1.0, self.ratio)
        return (busy_us + self.gap_us) / self.launches


@dataclass(frozen=True, slots=True)
class Expected:
    """Milliseconds of a step and tokens a second; `plan` is what bandwidths alone allow, reads hidden or not."""

    hits: float
    misses: float
    misses_ms: float
    ms: Range
    tokens_per_s: Range
    plan: Range


def main() -> None:
    figures = _measured(RESULTS / "decode_profile.json")
    model = ModelConfig.from_published(published_config("full"))
    result = report(figures, model)
    _show(result, figures)
    save("gb10", result)


def _measured(path: Path) -> dict[str, Any]:
    try:
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    except OSError as error:
        raise SystemExit(f"{path}: cannot read ({error.strerror}); run benchmarks.full_width on a GPU first") from error
    return figures


def report(figures: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Everything, with what it was worked out from. `figures` are those of `benchmarks.decode_profile`."""
    cost = make_plan(load_config(CONFIGS / "spark.toml"), model, load_machine(CONFIGS / "machines" / "spark.toml")).cost
    launches = Counter(launch.name for launch in step_launches(model, Extent(FIRST_EXTENT), sum(PROFILED) // 2))
    kernels = _kernels(figures)
    floor_ms = 1e3 * cost.memory_bytes / cost.memory_bandwidth
    lost_ms = sum(n * kernels[name].lost_us(figures["ceiling_tb_s"]) for name, n in launches.items()) / 1e3
    ratio_ms = sum(n * kernels[name].same_ratio_us(cost.memory_bandwidth) for name, n in launches.items()) / 1e3
    step_ms = Range(floor_ms + lost_ms, max(floor_ms + lost_ms, ratio_ms))
    return {
        "cost": asdict(cost),
        "launches": launches.total(),
        "floor_ms": floor_ms,
        "lost_ms": lost_ms,
        "same_ratio_ms": ratio_ms,
        "miss_ms": miss_ms(cost),
        "expected": [asdict(expected(cost, step_ms, hits)) for hits in HITS],
        "published": [each._asdict() for each in PUBLISHED],
    }


def _kernels(figures: Mapping[str, Any]) -> dict[str, Kernels]:
    scale = figures["wall_us"] / (figures["kernels_us"] + figures["gaps_us"])
    return {
        row["name"]: Kernels(row["launches"], scale * row["us"], scale * row["gap_us"], row["mb"], row["ratio"] / scale)
        for row in figures["kernels"]
    }


def miss_ms(cost: StepCost) -> float:
    """One record's read, copy, and what comes with it."""
    return 1e3 * cost.record_bytes * (1 / cost.disk_bandwidth + 1 / COPY_BYTES_PER_S) + OVERHEAD_MS


def expected(cost: StepCost, step_ms: Range, hits: float) -> Expected:
    """`step_ms` is of a step that hits, from the hopeful to the cautious estimate."""
    misses = cost.uses * (1 - hits)
    on_top = misses * miss_ms(cost)
    ms = Range(step_ms.low + on_top, step_ms.high + on_top)
    plan = tokens_per_s(cost, Range(hits, hits))
    assert plan is not None, "the machine's file names both bandwidths"
    return Expected(hits, misses, on_top, ms, Range(1e3 / ms.high, 1e3 / ms.low), plan)


def _show(result: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    console = Console(width=130, highlight=False)
    for line in _arithmetic(result, figures):
        console.print(line)
    table = Table(title="Expected of a GB10, not measured on one", title_justify="left")
    for number, heading in enumerate(["hits", "misses a step", "ms of misses", "ms a step", "tokens/s", "the plan's"]):
        table.add_column(heading, justify="right" if number else "left")
    for row in result["expected"]:
        ranges = [f"{row[key]['low']:.1f} to {row[key]['high']:.1f}" for key in ("ms", "tokens_per_s", "plan")]
        table.add_row(f"{row['hits']:.0%}", f"{row['misses']:.1f}", f"{row['misses_ms']:.1f}", *ranges)
    console.print(table)
    peers = Table(title="Published, one DGX Spark, experts as published, on NVMe", title_justify="left")
    for heading in ("engine", "tokens/s", "conditions", "source"):
        peers.add_column(heading)
    for each in result["published"]:
        peers.add_row(*each.values())
    console.print(peers)


def _arithmetic(result: Mapping[str, Any], figures: Mapping[str, Any]) -> Sequence[str]:
    cost = result["cost"]
    memory_bytes = cost["dense_bytes"] + cost["uses"] * cost["record_bytes"]
    ratio, lost = result["same_ratio_ms"], result["lost_ms"]
    return (
        f"floor: {cost['dense_bytes'] / 1e9:.2f} GB dense + {cost['uses']} x {cost['record_bytes'] / 1e6:.2f} MB of "
        f"experts = {memory_bytes / 1e9:.2f} GB, at {cost['memory_bandwidth'] / 1e9:.0f} GB/s: "
        f"{result['floor_ms']:.1f} ms",
        f"the same time lost: {result['launches']} launches lose {lost:.1f} ms, as measured beside a ceiling of "
        f"{figures['ceiling_tb_s']:.2f} TB/s: {result['floor_ms'] + lost:.1f} ms",
        f"the same ratio of the ceiling in every kernel: {ratio:.1f} ms",
        f"a miss: {cost['record_bytes'] / 1e6:.2f} MB at {cost['disk_bandwidth'] / 1e9:.1f} GB/s, copied at "
        f"{COPY_BYTES_PER_S / 1e9:.0f} GB/s, and {OVERHEAD_MS} ms = {result['miss_ms']:.2f} ms",
    )


if __name__ == "__main__":
    main()
