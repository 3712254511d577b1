"""Finding stop texts in text that arrives in pieces.

The text ends where the first stop text is complete; where several are complete at one place the longest counts. What
could be a beginning of one is held back. Work per letter does not depend on how much came before (Knuth-Morris-Pratt).
"""

from __future__ import annotations

from collections.abc import Sequence

from services.front.chat.messages import ChatError

# Each stop text costs work for every letter of an answer.
MAX_STOPS = 16
MAX_STOP_LETTERS = 1_000


def check_stops(stops: Sequence[str], where: str) -> None:
    """Raises ChatError if these are more than a request may have."""
    if len(stops) > MAX_STOPS:
        raise ChatError(f"{where} can have {MAX_STOPS} texts at most, not {len(stops)}")
    if sum(map(len, stops)) > MAX_STOP_LETTERS:
        raise ChatError(f"{where} can have {MAX_STOP_LETTERS} letters in all")


class StopFinder:
    """Feed it the pieces until something is `found`; then `flush` what was held back for nothing."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty texts."""
        self._stops = [(stop, _borders(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is settled now: before the stop text if one is complete, and never part of one."""
        if not self._stops or not piece:
            return piece
        for i, letter in enumerate(piece):
            if (stop := self._step(letter)) is not None:
                self.found = stop
                text, self._held = self._held + piece[: i + 1], ""
                return text[: len(text) - len(stop)]
        text = self._held + piece
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back; the search starts anew."""
        text, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return text

    def _step(self, letter: str) -> str | None:
        """The longest stop text that ends with this letter."""
        ended = None
        for i, (stop, borders) in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != letter:
                n = borders[n - 1]
            n += stop[n] == letter
            self._matched[i] = n
            if n == len(stop) and ended is None:
                ended = stop
        return ended


def _borders(text: str) -> list[int]:
    """For each beginning of the text, the length of its longest proper beginning that is also its end."""
    borders = [0] * len(text)
    n = 0
    for i in range(1, len(text)):
        while n and text[i] != text[n]:
            n = borders[n - 1]
        n += text[i] == text[n]
        borders[i] = n
    return borders
