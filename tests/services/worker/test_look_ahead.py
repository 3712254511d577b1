"""Guesses go on while enough of them come true, rest when they do not, and are tried again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.look_ahead import LEAST_RIGHT, RECENT, REST, WINDOW, LookAhead, LookAheadCounters

K = 4
SECONDS = st.floats(1e-5, 10.0)


def play(look_ahead: LookAhead, chances: int, right: int, lead: float = 1.0) -> int:
    """So many chances to guess K absent experts, of which `right` are then looked up, after `lead`; how often it
    guessed."""
    made = 0
    for _ in range(chances):
        if look_ahead.may_guess():
            made += 1
            look_ahead.guessed(3, range(K), now=5.0)
        look_ahead.looked_up(3, range(K - right, 2 * K - right), now=5.0 + lead)
    return made


def measured(read: float, lead: float) -> LookAhead:
    look_ahead = LookAhead(LookAheadCounters())
    look_ahead.was_read(read)
    look_ahead.was_ahead(lead)
    return look_ahead


def test_counts_what_was_guessed_and_what_came_true():
    counters = LookAheadCounters()
    look_ahead = LookAhead(counters)
    look_ahead.guessed(3, (1, 2, 5), now=0.0)
    look_ahead.looked_up(2, (1, 2, 5), now=0.0)
    assert counters == LookAheadCounters(0, 0), "another layer's look-up says nothing"
    look_ahead.looked_up(3, (2, 4, 5, 9), now=0.0)
    look_ahead.looked_up(3, (1, 2), now=0.0)
    assert counters == LookAheadCounters(3, 2), "a guess counts once"


@pytest.mark.parametrize("right", [2, 3, 4])
def test_goes_on_while_it_pays(right):
    assert right / K > LEAST_RIGHT
    assert play(LookAhead(LookAheadCounters()), 2000, right) == 2000


@pytest.mark.parametrize("right", [0, 1])
def test_rests_when_it_does_not_pay_and_tries_again(right):
    """A try ends with the first wrong guess that a whole window could not make up for."""
    look_ahead = LookAhead(LookAheadCounters())
    trial = int((1 - LEAST_RIGHT) * WINDOW) // (K - right) + 1
    assert trial <= WINDOW // K
    assert play(look_ahead, trial, right) == trial
    assert play(look_ahead, REST - 1, right) == 0
    assert play(look_ahead, trial, right) == trial
    assert play(look_ahead, REST - 1, right) == 0


def test_recovers_and_notices_a_change_of_fortune_soon():
    look_ahead = LookAhead(LookAheadCounters())
    assert play(look_ahead, 10_000, K) == 10_000
    assert play(look_ahead, 10_000, 0) < 4 * WINDOW // K


def test_a_gpu_whose_chances_are_counted_later_is_judged_alike():
    """So many look-ups at a time, and what came of their guesses."""
    counters = LookAheadCounters()
    look_ahead, look_ups = LookAhead(counters), 40
    for _ in range(10):
        look_ahead.score(WINDOW, WINDOW)
        assert look_ahead.may_guess(look_ups)
    assert counters == LookAheadCounters(10 * WINDOW, 10 * WINDOW)
    look_ahead.score(4 * WINDOW, 0)
    for _ in range(REST // look_ups):
        assert not look_ahead.may_guess(look_ups)
    assert look_ahead.may_guess(look_ups)


@pytest.mark.parametrize(
    ("read", "lead", "least"),
    [
        (0.0014, 0.0012, LEAST_RIGHT),  # a right guess spares nearly all of the read
        (0.0014, 0.0100, LEAST_RIGHT),
        (0.0030, 0.0020, LEAST_RIGHT),
        (0.0030, 0.0015, 0.5),
        (0.0077, 0.00013, 0.983),  # it spares nearly nothing, a wrong one costs nearly all
        (0.0077, 0.0, 1.0),
    ],
)
def test_the_share_that_must_come_true_depends_on_what_a_guess_spares(read: float, lead: float, least: float) -> None:
    assert measured(read, lead).least_right == pytest.approx(least, abs=1e-3)


@given(SECONDS, SECONDS, st.integers(0, 100))
def test_at_that_share_guesses_spare_as_much_as_they_cost(read: float, lead: float, percent: int) -> None:
    spared = percent / 100 * min(lead, read)
    lost = (1 - percent / 100) * max(0.0, read - lead)
    pays = spared >= lost * (1 - 1e-9) and percent / 100 >= LEAST_RIGHT
    least = measured(read, lead).least_right
    assert pays == (percent / 100 >= least) or spared == pytest.approx(lost)


def test_nothing_is_known_of_a_drive_that_was_not_measured():
    look_ahead = LookAhead(LookAheadCounters())
    look_ahead.was_ahead(1e-9)
    assert look_ahead.least_right == LEAST_RIGHT
    look_ahead = LookAhead(LookAheadCounters())
    look_ahead.was_read(10.0)
    assert look_ahead.least_right == LEAST_RIGHT


@pytest.mark.parametrize("slower", [4, 1, 0.3])
def test_shared_or_spared_reads_and_rare_stalls_change_nothing_but_another_drive_does(slower: float) -> None:
    look_ahead, rng = measured(0.010, 0.004), random.Random(1)
    for number in range(10 * RECENT):
        look_ahead.was_read(0.010 * [1, 3, 0.01, 2, 1, 4, 2, 1][number % 8])
        look_ahead.was_ahead(0.004 * rng.choice([0.9, 1.0, 1.0, 1.1, 1000]))
        assert look_ahead.least_right == pytest.approx(0.6, abs=0.05)
    for _ in range(RECENT):
        look_ahead.was_read(0.010 * slower)
    assert look_ahead.least_right == pytest.approx(max(LEAST_RIGHT, 1 - 0.4 / slower), abs=0.05)


def test_a_try_that_cannot_pay_costs_a_few_guesses():
    """Three of four right are far too few where a layer is over long before a read."""
    look_ahead = measured(0.0077, 0.00013)
    made = play(look_ahead, 100 * REST, right=3, lead=0.00013)
    assert 90 < made < 100 * 8
    assert play(measured(0.0014, 0.0012), 10_000, right=3, lead=0.0012) == 10_000


def test_a_drive_that_turns_out_to_be_slow_ends_guessing_at_the_next_wrong_one():
    look_ahead = LookAhead(LookAheadCounters())
    assert play(look_ahead, 100, right=3, lead=0.001) == 100
    look_ahead.was_read(0.1)
    assert play(look_ahead, 100, right=3, lead=0.001) == 1
