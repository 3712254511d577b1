"""Whether guesses about the next layer's experts are worth their reads. Pure.

A wrong guess takes the cache a slot and the drive a read, a right one spares the worker a wait. The share that came
true decides: while it is too low no guess is made, and after a rest the matter is tried anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Of the experts that were guessed while absent, at least this share must be looked up. What gives way for one is
# looked up next with a chance of about num_experts_per_tok / n_routed_experts, far less.
LEAST_RIGHT = 1 / 3
# Guessed experts between two judgements; older ones count half as much each time.
WINDOW = 256
# Chances to guess that pass before another try: a hundred tokens of the published model.
REST = 4096


@dataclass(slots=True)
class LookAheadCounters:
    """Cumulative: experts guessed while they were absent, and those of them that were then looked up."""

    guessed: int = 0
    guessed_right: int = 0


class LookAhead:
    """Keeps the score of one worker's guesses. A guess is for one layer and lasts until that layer is looked up."""

    def __init__(self, counters: LookAheadCounters) -> None:
        self._counters = counters
        self._layer = -1
        self._guess: frozenset[int] = frozenset()
        self._guessed = 0.0
        self._right = 0.0
        self._rest = 0

    def may_guess(self, chances: int = 1) -> bool:
        """Asked once for every chance, or once for some that have passed."""
        self._rest = max(0, self._rest - chances)
        return not self._rest

    def guessed(self, layer: int, expert_ids: Iterable[int]) -> None:
        """These were absent, and were asked for on a guess."""
        self._layer, self._guess = layer, frozenset(expert_ids)

    def looked_up(self, layer: int, expert_ids: Iterable[int]) -> None:
        """What a layer needed in truth."""
        if layer != self._layer:
            return
        self._layer = -1
        self.score(len(self._guess), len(self._guess.intersection(expert_ids)))

    def score(self, guessed: int, right: int) -> None:
        """Of so many absent experts that were guessed, so many were then looked up."""
        self._counters.guessed += guessed
        self._counters.guessed_right += right
        self._guessed += guessed
        self._right += right
        if self._guessed >= WINDOW:
            self._judge()

    def _judge(self) -> None:
        if self._right < LEAST_RIGHT * self._guessed:
            self._rest = REST
            self._guessed = self._right = 0.0
        else:
            self._guessed /= 2
            self._right /= 2
