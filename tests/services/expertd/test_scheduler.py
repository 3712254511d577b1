"""What is read next, into which slot, and who may go on: without clock, disk or sockets."""

import pytest
from helpers.scheduler import Bench
from hypothesis import given
from hypothesis import strategies as st

from services.expertd.policy import Key
from services.expertd.scheduler import BACKGROUND, HINT_SHARE, Load, Urgency


def test_a_miss_is_read_published_and_answered():
    bench = Bench(4)
    assert bench.ask("a", 0, 1, 2) is False
    assert bench.start() == (0, 1)
    assert bench.table == {}
    assert bench.scheduler.finish(bench.load, True) == []
    assert bench.start() == (0, 2)
    assert bench.scheduler.finish(bench.load, True) == ["a"]
    assert set(bench.table) == {Key(0, 1), Key(0, 2)}
    assert bench.ask("b", 0, 1, 2) is True


def test_demand_goes_before_ahead_before_hints_before_guesses_before_warming():
    bench = Bench(8)
    bench.scheduler.warm(Key(3, 0), 5)
    bench.guess(2, 1)
    bench.hint(2, 0)
    bench.ask("later", 1, 0, ahead=True)
    bench.ask("now", 0, 0)
    assert bench.run() == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]


def test_nothing_less_urgent_takes_the_slot_that_demand_waits_for():
    bench = Bench(2)
    bench.ask("ahead", 1, 0, 1, ahead=True)
    assert [bench.start(), bench.start()] == [(1, 0), (1, 1)]
    loads = [bench.load]
    bench.ask("now", 0, 5)
    bench.hint(2, 0)
    assert bench.start() is None
    assert bench.scheduler.finish(loads[0], False) == ["ahead"]
    assert bench.start() == (0, 5)


def test_demand_joins_a_queued_prefetch_and_makes_it_urgent():
    bench = Bench(8)
    bench.ask("ahead", 1, 0, ahead=True)
    bench.hint(2, 7)
    bench.ask("now", 2, 7)
    assert bench.scheduler.queued(Urgency.HINT) == 0
    assert bench.run() == [(2, 7), (1, 0)]
    counters = bench.scheduler.counters
    assert (counters.misses, counters.late_hits, counters.prefetched) == (1, 0, 1)


def test_demand_joins_a_prefetch_in_flight_as_a_late_hit():
    bench = Bench(8)
    bench.hint(2, 7)
    assert bench.start() == (2, 7)
    bench.ask("now", 2, 7)
    assert bench.start() is None
    assert bench.scheduler.finish(bench.scheduler._loads[Key(2, 7)], True) == ["now"]
    counters = bench.scheduler.counters
    assert (counters.misses, counters.late_hits, counters.prefetched) == (0, 1, 1)


def test_what_arrived_since_the_worker_looked_is_a_late_hit_whose_use_the_worker_counts():
    bench = Bench(8)
    bench.hint(2, 7)
    bench.run()
    assert bench.ask("now", 2, 7) is True
    assert bench.scheduler.counters.late_hits == 1
    assert bench.cache.uses() == {Key(2, 7): 0}


def test_looking_ahead_counts_nothing():
    bench = Bench(8)
    bench.ask("ahead", 0, 1, 2, ahead=True)
    counters = bench.scheduler.counters
    assert (counters.misses, counters.late_hits) == (0, 0)


def test_two_requests_for_one_record_are_one_read_and_both_end():
    bench = Bench(8)
    bench.ask("ahead", 0, 1, ahead=True)
    bench.ask("now", 0, 1)
    assert bench.start() == (0, 1)
    assert sorted(bench.scheduler.finish(bench.load, True)) == ["ahead", "now"]
    assert bench.start() is None


def test_a_failure_ends_only_the_requests_that_wait_for_it_and_returns_the_slot():
    bench = Bench(2)
    bench.ask("ahead", 1, 4, ahead=True)
    bench.ask("now", 0, 5)
    assert bench.start() == (0, 5)
    assert bench.scheduler.finish(bench.load, False) == ["now"]
    assert (bench.scheduler.counters.read_errors, bench.slots.num_free) == (1, 2)
    assert Key(0, 5) not in bench.table
    assert bench.start() == (1, 4)
    assert bench.scheduler.finish(bench.load, True) == ["ahead"]


def test_other_records_of_a_failed_request_arrive_all_the_same():
    bench = Bench(4)
    bench.ask("now", 0, 1, 2)
    bench.start()
    assert bench.scheduler.finish(bench.load, False) == ["now"]
    assert bench.run() == [(0, 2)]
    assert set(bench.table) == {Key(0, 2)}


def test_a_standing_workers_misses_take_any_slot_but_those_it_holds_at_once():
    bench = Bench(4)
    bench.fill(0)
    held = (bench.table[Key(0, 0)], bench.table[Key(0, 1)])
    bench.ask("now", 1, 5, 6, held=held)
    assert bench.run() == [(1, 5), (1, 6)]
    assert set(bench.table) == {Key(0, 0), Key(0, 1), Key(1, 5), Key(1, 6)}


def test_what_a_look_up_has_got_is_not_given_up_for_its_other_misses():
    bench = Bench(4)
    bench.fill(0)
    bench.ask("now", 1, 0, 1, 2, 3)
    assert bench.run() == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert all(Key(1, e) in bench.table for e in range(4))


def test_what_was_given_up_a_moment_ago_is_there_again_without_a_read():
    """A GPU may have taken it from the table between its look-up and the request for it."""
    bench = Bench(4)
    bench.fill(0)
    taken = bench.table[Key(0, 0)]
    bench.hint(1, 0)
    assert bench.start() is None  # the first to go is retired, not free
    assert Key(0, 0) not in bench.table
    assert bench.ask("now", 0, 0, held=()) is True
    assert bench.table[Key(0, 0)] == taken
    assert bench.scheduler.counters.late_hits == 1
    assert bench.start() is None  # the next to go
    bench.clock += 3
    assert bench.run() == [(1, 0)]
    assert bench.table[Key(0, 0)] == taken


def test_a_request_for_a_look_up_that_is_over_is_answered_and_lends_no_slot():
    bench = Bench(4)
    bench.fill(0)
    assert bench.scheduler.fetch("late", 1, (5,), (), bench.clock - 1, False) is True
    assert bench.scheduler.unfinished == 0
    bench.hint(2, 0)
    assert bench.start() is None
    assert bench.slots.num_retired == 1


def test_a_pin_ends_with_its_clock_however_far_it_was_set():
    bench = Bench(2)
    bench.scheduler.fetch("ahead", 0, (0, 1), (), 10**9, True)
    bench.run()
    bench.hint(1, 0)
    assert bench.start() is None
    bench.clock = 2
    assert bench.start() is None  # retired now, free when the clock has passed
    assert bench.slots.num_retired == 1
    bench.clock = 4
    assert bench.start() == (1, 0)


@pytest.mark.parametrize("wish", ["hint", "guess", "warm"])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_nobody_waits_for_waits_until_nobody_waits_for_the_drive(wish, ahead):
    bench = Bench(8)
    bench.ask("now", 0, 0, ahead=ahead)
    bench.wish(wish, 1, 0)
    assert bench.start() == (0, 0)
    demand = bench.load
    assert bench.start() is None, "the demand is still being read"
    assert not bench.scheduler.has_next, "so there is nothing to look for until it ends"
    assert bench.scheduler.finish(demand, True) == ["now"]
    assert bench.scheduler.has_next
    assert bench.start() == (1, 0)


@pytest.mark.parametrize("wish", ["hint", "guess", "warm"])
def test_a_miss_finds_few_reads_in_flight_that_nobody_waits_for(wish):
    bench = Bench(32)
    bench.wish(wish, 1, *range(6))
    for expert in range(BACKGROUND):
        assert bench.start() == (1, expert)
    assert bench.start() is None
    background = bench.load_of(1, 0)
    bench.ask("now", 0, 1, 2, 3)
    assert [bench.start() for _ in range(4)] == [(0, 1), (0, 2), (0, 3), None]
    bench.scheduler.finish(background, True)
    assert bench.start() is None, "one that ends makes no room for another beside the misses"
    for expert in (1, 2, 3):
        bench.scheduler.finish(bench.load_of(0, expert), True)
    assert [bench.start(), bench.start()] == [(1, BACKGROUND), None]


def test_warming_takes_every_reader_while_there_is_no_worker():
    bench = Bench(16)
    bench.attached = False
    bench.wish("warm", 0, *range(10))
    assert [bench.start() for _ in range(11)] == [*((0, expert) for expert in range(10)), None]


WISHES = st.sampled_from(["now", "ahead", "hint", "guess", "warm"])
STEPS = st.one_of(
    st.tuples(WISHES, st.integers(0, 3), st.integers(0, 7)),
    st.tuples(st.just("start"), st.just(0), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 9), st.just(0)),
)


@given(st.lists(STEPS, max_size=80))
def test_every_start_is_the_most_urgent_that_may_be_and_everything_is_read_in_the_end(steps):
    bench = Bench(64)
    flying: list[Load[str]] = []

    def start() -> bool:
        awaited, before = bench.awaited(), len(flying)
        urgent = [urgency for urgency in Urgency if bench.scheduler.queued(urgency)]
        may = bool(urgent) and (urgent[0] <= Urgency.AHEAD or (not awaited and before < BACKGROUND))
        assert bench.scheduler.has_next == may
        if bench.start() is None:
            assert not may
            return False
        assert bench.load is not None
        assert bench.load.urgency is urgent[0]
        flying.append(bench.load)
        return True

    for name, a, b in steps:
        match name:
            case "start":
                start()
            case "finish":
                if flying:
                    bench.scheduler.finish(flying.pop(a % len(flying)), True)
            case "now" | "ahead":
                bench.ask(name, a, b, ahead=name == "ahead")
            case wish:
                bench.wish(wish, a, b)
    while start() or flying:
        if flying:
            bench.scheduler.finish(flying.pop(), True)
    assert bench.scheduler.unfinished == 0


def test_a_new_guess_replaces_what_is_left_of_the_last_but_not_what_was_asked_for_since():
    bench = Bench(8)
    bench.guess(1, 0, 1)
    assert bench.start() == (1, 0)
    bench.scheduler.finish(bench.load, True)
    bench.guess(2, 5, 6)
    assert bench.scheduler.queued(Urgency.GUESS) == 2
    bench.ask("now", 2, 5)
    bench.guess(3, 7)
    assert bench.run() == [(2, 5), (3, 7)]


def test_prefetched_experts_have_no_use_until_they_are_used():
    bench = Bench(8)
    bench.guess(1, 0)
    bench.hint(1, 1)
    bench.ask("now", 1, 2)
    bench.run()
    assert bench.cache.uses() == {Key(1, 0): 0, Key(1, 1): 0, Key(1, 2): 1}
    bench.hint(1, 3)
    bench.ask("now", 1, 3)
    bench.run()
    assert bench.cache.uses()[Key(1, 3)] == 1, "asked for before it came"


def test_hints_never_flush_the_cache():
    bench = Bench(16)
    bench.fill(0)
    bench.hint(1, *range(100))
    assert bench.scheduler.queued(Urgency.HINT) == 16 // HINT_SHARE
    for _ in range(100):
        assert bench.start() is None
    assert len(bench.cache) >= 16 - 16 // HINT_SHARE


def test_many_hints_and_a_busy_worker_leave_demand_a_slot():
    bench = Bench(8)
    bench.fill(0)
    bench.hint(1, *range(100))
    for _ in range(100):
        bench.start()
    bench.ask("now", 2, 0, 1, 2, 3)
    assert bench.run()[:4] == [(2, 0), (2, 1), (2, 2), (2, 3)]


def test_a_reserve_lets_hints_start_at_once_and_grows_back():
    bench = Bench(8, reserve=2)
    bench.fill(0)
    bench.start()
    bench.clock += 3
    assert bench.start() is None
    assert bench.slots.num_free == 2
    bench.hint(1, 0, 1)
    assert [bench.start(), bench.start()] == [(1, 0), (1, 1)]
    assert bench.start() is None
    assert (bench.slots.num_free, bench.slots.num_retired) == (0, 2)
    bench.clock += 2
    bench.start()
    assert bench.slots.num_free == 2


def test_a_lost_worker_takes_its_wishes_and_pins_along_and_the_cache_stays():
    bench = Bench(4)
    bench.fill(0)
    resident = dict(bench.table)
    bench.ask("ahead", 1, 0, 1, ahead=True)
    bench.ask("now", 1, 2, held=tuple(resident.values())[:1])
    bench.hint(1, 3)
    assert bench.start() == (1, 2)
    flying = bench.load
    bench.attached = False
    assert sorted(bench.scheduler.worker_lost()) == ["ahead", "now"]
    assert (bench.scheduler.unfinished, bench.scheduler.in_flight) == (1, 1)
    assert bench.scheduler.finish(flying, True) == []
    assert len(bench.cache) == 4
    assert bench.start() is None
    bench.attached = True
    assert bench.ask("heir", 1, 2) is True
    bench.ask("heir", 3, 0, 1, 2, 3)
    assert len(bench.run()) == 4


def test_warming_keeps_what_is_known_of_a_records_use():
    bench = Bench(4)
    bench.scheduler.warm(Key(0, 0), 9)
    bench.run()
    assert bench.cache.uses() == {Key(0, 0): 9}
    assert bench.scheduler.counters.prefetched == 0


@pytest.mark.parametrize("ids", [(), (1,)])
def test_a_request_without_a_miss_is_answered_at_once(ids):
    bench = Bench(4)
    bench.hint(0, 1)
    bench.run()
    assert bench.ask("now", 0, *ids) is True
