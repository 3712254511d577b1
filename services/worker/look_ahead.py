"""Whether guesses about the next layer's experts are worth their reads. Pure.

A wrong guess costs a slot of the cache and a read, a right one saves the worker part of a wait. The share that came
true decides: while it is too low no guess is made, and after a pause guessing is tried again.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

# Of the experts that were guessed while absent, at least this share must be looked up, however soon a read is over.
# What gives way for one is looked up next with a chance of about num_experts_per_tok / n_routed_experts, far less.
LEAST_RIGHT = 1 / 3
# Guessed experts between two judgements; older ones count half as much each time.
WINDOW = 256
# Chances to guess that pass before another try: a hundred tokens of the published model.
REST = 4096
# Durations of each kind that count.
RECENT = 32


@dataclass(slots=True)
class LookAheadCounters:
    """Cumulative: experts guessed while they were absent, and those of them that were then looked up."""

    guessed: int = 0
    guessed_right: int = 0


class LookAhead:
    """Keeps the score of one worker's guesses. A guess is for one layer and lasts until that layer is looked up.

    Times are in seconds, by a clock that stands still while the worker waits for experts: their reads come first, so
    those of guesses make no progress then.
    """

    def __init__(self, counters: LookAheadCounters) -> None:
        self._counters = counters
        self._layer = -1
        self._guess: frozenset[int] = frozenset()
        self._guessed_at = 0.0
        self._guessed = 0.0
        self._right = 0.0
        self._rest = 0
        self._reads: deque[float] = deque(maxlen=RECENT)
        self._leads: deque[float] = deque(maxlen=RECENT)

    @property
    def least_right(self) -> float:
        """The share of guesses that must come true.

        A right one spares as much of a wait as its read is ahead of the look-up. A wrong one is still being read then,
        and takes what is waited for as long as it has left. The two are even at 1 - lead / read.
        """
        if not (self._reads and self._leads):
            return LEAST_RIGHT
        # Most others shared the drive; a few found the record in a slot that it had only just given up.
        read = sorted(self._reads)[len(self._reads) // 4]
        lead = statistics.median(self._leads)  # layers differ, and now and then the process sleeps
        return max(LEAST_RIGHT, 1 - lead / read)

    def may_guess(self, chances: int = 1) -> bool:
        """Asked once for every chance, or once for some that have passed."""
        self._rest = max(0, self._rest - chances)
        return not self._rest

    def guessed(self, layer: int, expert_ids: Iterable[int], now: float) -> None:
        """These were absent, and were asked for on a guess."""
        self._layer, self._guess, self._guessed_at = layer, frozenset(expert_ids), now

    def looked_up(self, layer: int, expert_ids: Iterable[int], now: float) -> None:
        """What a layer needed in truth."""
        if layer != self._layer:
            return
        self._layer = -1
        self.was_ahead(now - self._guessed_at)
        self.score(len(self._guess), len(self._guess.intersection(expert_ids)))

    def was_ahead(self, lead: float) -> None:
        """A guess is, or would have been, so much earlier than its layer's look-up."""
        self._leads.append(lead)

    def was_read(self, seconds: float) -> None:
        """How long it took from asking for one record to having it; nothing else was asked for with it or before."""
        self._reads.append(seconds)

    def score(self, guessed: int, right: int) -> None:
        """Of so many absent experts that were guessed, so many were then looked up."""
        if not guessed:
            return
        self._counters.guessed += guessed
        self._counters.guessed_right += right
        self._guessed += guessed
        self._right += right
        self._judge()

    def _judge(self) -> None:
        """Rest as soon as nothing that may still come within the window makes the share large enough."""
        wrong = self._guessed - self._right
        if wrong > (1 - self.least_right) * max(WINDOW, self._guessed):
            self._rest = REST
            self._guessed = self._right = 0.0
        elif self._guessed >= WINDOW:
            self._guessed /= 2
            self._right /= 2
