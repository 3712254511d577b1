"""Guesses go on while enough of them come true, rest when they do not, and are tried again."""

from __future__ import annotations

import pytest

from services.worker.look_ahead import LEAST_RIGHT, REST, WINDOW, LookAhead, LookAheadCounters

K = 4


def play(look_ahead: LookAhead, chances: int, right: int) -> int:
    """So many chances to guess K absent experts, of which `right` are then looked up; how often it guessed."""
    made = 0
    for _ in range(chances):
        if look_ahead.may_guess():
            made += 1
            look_ahead.guessed(3, range(K))
        look_ahead.looked_up(3, range(K - right, 2 * K - right))
    return made


def test_counts_what_was_guessed_and_what_came_true():
    counters = LookAheadCounters()
    look_ahead = LookAhead(counters)
    look_ahead.guessed(3, (1, 2, 5))
    look_ahead.looked_up(2, (1, 2, 5))
    assert counters == LookAheadCounters(0, 0), "another layer's look-up says nothing"
    look_ahead.looked_up(3, (2, 4, 5, 9))
    look_ahead.looked_up(3, (1, 2))
    assert counters == LookAheadCounters(3, 2), "a guess counts once"


@pytest.mark.parametrize("right", [2, 3, 4])
def test_goes_on_while_it_pays(right):
    assert right / K > LEAST_RIGHT
    assert play(LookAhead(LookAheadCounters()), 2000, right) == 2000


@pytest.mark.parametrize("right", [0, 1])
def test_rests_when_it_does_not_pay_and_tries_again(right):
    look_ahead = LookAhead(LookAheadCounters())
    trial = WINDOW // K
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
