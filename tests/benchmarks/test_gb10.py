"""The GB10's expectation from kernels measured elsewhere: no less than the floor, and by hand where that is easy."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.decode_launches import Launch, step_launches
from benchmarks.decode_profile import Timed, summary
from benchmarks.gb10 import expected, miss_ms, report
from services.worker.decode.extent import Extent
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.synth_shapes import published_config
from shared.planning.expectation import Range, StepCost

CEILING = 4e12
FULL, SLICE = (ModelConfig.from_published(published_config("full", layers, 256)) for layers in (43, 8))
COST = StepCost(7 * 10**9, 13_369_344, 258, 249e9, 9.7e9)


def figures(us: float, part_of_ceiling: float, slowdown: float = 1.0) -> dict[str, Any]:
    """A slice whose kernels each lose `us` and reach this part of the ceiling, seen by a profiler that slows them."""

    def timed(launch: Launch) -> Timed:
        return Timed(slowdown * (launch.nbytes / CEILING / part_of_ceiling * 1e6 + us), 0.0)

    launches = step_launches(SLICE, Extent(2048), 420)
    times = [timed(each) for each in launches]
    wall_us = sum(time.us for time in times) / slowdown
    return summary(8, launches, times, wall_us=wall_us, bytes_per_s=CEILING)


def test_a_gpu_that_loses_nothing_is_at_its_floor() -> None:
    result = report(figures(0.0, 1.0), FULL)
    assert result["lost_ms"] == pytest.approx(0, abs=1e-6)
    assert result["floor_ms"] == pytest.approx(45, abs=1)
    assert result["same_ratio_ms"] == pytest.approx(result["floor_ms"], rel=0.02)
    hit = result["expected"][-1]
    assert (hit["misses"], hit["misses_ms"]) == (0, 0)
    assert 1e3 / hit["ms"]["high"] == hit["tokens_per_s"]["low"]


def test_microseconds_lost_are_lost_by_every_launch() -> None:
    result = report(figures(2.0, 1.0), FULL)
    assert result["lost_ms"] == pytest.approx(result["launches"] * 2e-3, rel=1e-3)


def test_what_the_profiler_adds_is_taken_away() -> None:
    keys = ("lost_ms", "same_ratio_ms")
    seen, slowed = report(figures(2.0, 0.8), FULL), report(figures(2.0, 0.8, slowdown=1.2), FULL)
    assert [seen[key] for key in keys] == pytest.approx([slowed[key] for key in keys])


def test_half_of_the_ceiling_is_half_of_the_speed_at_worst() -> None:
    result = report(figures(0.0, 0.5), FULL)
    assert result["same_ratio_ms"] == pytest.approx(2 * result["floor_ms"], rel=0.03)
    low, high = result["expected"][-1]["ms"].values()
    assert result["floor_ms"] < low < high


def test_a_miss_by_hand() -> None:
    assert miss_ms(COST) == pytest.approx(1.378 + 0.227 + 0.15, abs=0.001)
    at = expected(COST, Range(50.0, 60.0), 0.9)
    assert at.misses == pytest.approx(25.8)
    assert at.ms.low == pytest.approx(50 + 25.8 * miss_ms(COST))
    assert at.tokens_per_s.high == pytest.approx(1000 / at.ms.low)
    assert at.plan.low < at.plan.high
