"""From what the profiler saw to times of launches: whole steps, overlaps, gaps, shares and ratios."""

from __future__ import annotations

import pytest

from benchmarks.decode_launches import Launch
from benchmarks.decode_profile import Event, Timed, kernels_of, median_of_steps, summary

NAMES = ["first", "second", "third"]


def steps(number: int, *, begin: float = 0.0) -> list[Event]:
    """The second starts before the first has ended, the third after a gap of 2 us; the next step 1 us later."""
    each = [(0.0, 4.0), (3.0, 9.0), (11.0, 12.0)]
    return [
        Event(name, begin + 13 * i + a, begin + 13 * i + b)
        for i in range(number)
        for name, (a, b) in zip(NAMES, each, strict=True)
    ]


def test_times_and_gaps_add_up_to_the_step() -> None:
    timed = median_of_steps(steps(5), NAMES)
    assert timed == [Timed(4.0, 1.0), Timed(5.0, 0.0), Timed(1.0, 2.0)]
    assert sum(t.us + t.gap_us for t in timed) == 13.0


def test_steps_that_were_not_seen_whole_are_left_out() -> None:
    assert median_of_steps(steps(4)[2:-1], NAMES) == median_of_steps(steps(5), NAMES)
    with pytest.raises(ValueError, match="no whole step among 2 kernels"):
        median_of_steps(steps(2)[1:3], NAMES)


def test_a_kernel_inside_a_longer_one_takes_no_time() -> None:
    inside = [Event("first", 0, 10), Event("second", 2, 5), Event("third", 6, 12)]
    timed = median_of_steps([*inside, Event("first", 12, 13)], NAMES)
    assert timed == [Timed(10, 0), Timed(0, 0), Timed(2, 0)]


def test_other_kernels_than_the_tables_are_named() -> None:
    with pytest.raises(ValueError, match=r"3 kernels, not 3; .*\(1, 'another', 'second'\)"):
        median_of_steps(steps(3), ["first", "another", "third"])


def test_the_trace_is_put_in_order() -> None:
    trace = [
        {"cat": "kernel", "name": "b", "ts": 5.5, "dur": 1.0},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 9.0},
        {"name": "metadata"},
        {"cat": "kernel", "name": "a", "ts": 1.0, "dur": 2.0},
    ]
    assert kernels_of(trace) == [Event("a", 1.0, 3.0), Event("b", 5.5, 6.5)]


def test_rows_are_by_name_and_the_layers_are_what_is_left() -> None:
    launches = [
        Launch("begin", "k1", 0, "start"),
        Launch("matrix", "k2", 4_000_000),
        Launch("matrix", "k2", 4_000_000),
        Launch("vocabulary", "k3", 8_000_000, "head"),
    ]
    timed = [Timed(1, 1), Timed(2, 0), Timed(2, 0), Timed(4, 0)]
    found = summary(2, launches, timed, wall_us=12.0, bytes_per_s=4e12)
    assert [(row["name"], row["launches"], row["us"]) for row in found["kernels"]] == [
        ("matrix", 2, 4),
        ("vocabulary", 1, 4),
        ("begin", 1, 1),
    ]
    assert [row["ratio"] for row in found["kernels"]] == pytest.approx([0.5, 0.5, 0])
    assert [row["share"] for row in found["kernels"]] == pytest.approx([0.4, 0.4, 0.1])
    assert found["outside_us"] == {"start": 2, "head": 4, "sampling": 0}
    assert found["ms_per_layer"] == pytest.approx(0.006)
    assert found["ms_per_layer_without_start_head_sampling"] == pytest.approx(0.003)
    assert (found["kernels_us"], found["gaps_us"]) == (9, 1)
