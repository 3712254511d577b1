"""What misses cost: tickets to steps, the model beside the measured, and the parts that run without a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.decode_misses import TOGETHER, Alone, Judged, Piece, by_misses, comparison, layer_cost_ms
from benchmarks.decode_slice import Step, Ticket, decoding, steps_of
from shared.checkpoint.synth import SynthOptions, synthesise

LAYERS = 8


def test_tickets_belong_to_the_step_whose_clock_they_carry() -> None:
    times = [1.0, 1.010, 1.030, 1.031]
    end = 100 + 3 * LAYERS
    tickets = [Ticket(100, 2), Ticket(107, 1), Ticket(116, 3)]
    steps = steps_of(times, tickets, end, LAYERS)
    assert [step.missing for step in steps] == [(2, 1), (), (3,)]
    assert [step.ms for step in steps] == pytest.approx([10, 20, 1])
    assert [step.misses for step in steps] == [3, 0, 3]


def made_steps(costs: dict[int, float], hit_ms: float, number: int = 500) -> list[Step]:
    rng = random.Random(0)
    steps = []
    for _ in range(number):
        missing = tuple(rng.choices(list(costs), k=rng.randrange(5)))
        steps.append(Step(hit_ms + sum(costs[each] for each in missing) + rng.uniform(-0.05, 0.05), missing))
    return steps


def test_the_cost_of_a_layers_misses_is_found_again() -> None:
    costs = {1: 10.0, 2: 14.0, 3: 18.0}
    found = layer_cost_ms(made_steps(costs, 2.0), 2.0)
    assert found == pytest.approx(costs, abs=0.05)
    assert layer_cost_ms([Step(2.0, ())], 2.0) == {}


def test_rare_numbers_of_misses_are_left_out() -> None:
    steps = [*made_steps({1: 10.0, 2: 14.0}, 2.0), Step(500.0, (6,))]
    assert layer_cost_ms(steps, 2.0) == pytest.approx({1: 10.0, 2: 14.0}, abs=0.05)


def test_a_machine_that_is_as_expected() -> None:
    steps = [Step(2.0 + 3.0 * n, (1,) * n) for n in range(5) for _ in range(20)]
    judged = Piece(2.5, steps).judged(2.0, 0.5)
    found = comparison(judged, 2.0, records=250)
    assert found["measured_over_expected"] == pytest.approx(1)
    assert found["measured_over_records"] == pytest.approx(8.0 / (2.0 + 2.5 * 3.0)), "fifty were read and not missed"
    assert (found["misses_per_step"], found["records_per_step"]) == (2, 2.5)
    assert found["measured_ms"]["p99"] == found["expected_ms"]["p99"] == 14
    assert found["layer_ms"] == pytest.approx({1: 3.0})
    assert by_misses(judged)[3] == {"misses": 3, "steps": 20, "median_ms": 11.0, "expected_ms": 11.0}


def test_a_step_is_judged_by_the_drive_of_its_time() -> None:
    step = Step(30.0, (2, 1))
    fast, slow = (Piece(read_ms, [step]).judged(2.0, 0.5)[0] for read_ms in (5.0, 9.0))
    assert (fast.expected_ms, slow.expected_ms) == (2.0 + 3 * 5.5, 2.0 + 3 * 9.5)
    assert fast == Judged(step, 18.5)


@pytest.mark.system
def test_records_are_fetched_by_the_real_expertd(tmp_path: Path) -> None:
    """On a CPU, where the same provider looks up and waits, but no graph writes tickets."""
    synthesise(tmp_path / "checkpoint", SynthOptions("small", 8, 64))
    with decoding(tmp_path / "checkpoint", 0.6, device="cpu") as own:
        found = Alone(own).medians()
        before, steps = own.counts(), own.steps(1, tokens=6)
        reads = {name: count - before[name] for name, count in own.counts().items()}
    assert found.keys() == {f"{kind} {count}" for kind in ("read", "fetch") for count in TOGETHER}
    assert min(found.values()) > 0
    assert len(steps) == 5
    assert all(step.ms > 0 and not step.missing for step in steps)
    assert reads.keys() == {"misses", "late_hits", "prefetched", "hinted", "guessed", "guessed_right"}
    assert reads["misses"] > 0
    assert reads["hinted"] + reads["guessed"] >= reads["prefetched"] > 0
    assert reads["guessed"] >= reads["guessed_right"] > 0
