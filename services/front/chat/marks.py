"""Finding marks in text that arrives in pieces.

A mark may be cut anywhere, so the end of what has come is held back while it could be a mark's beginning, and no
longer. Work per piece does not depend on how much came before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Literal texts to look for; where two begin at one place the longer one counts.

    No mark may be a proper beginning of another, and none may lie inside another except at its end: then the
    leftmost mark is known as soon as it is complete.
    """

    pattern: re.Pattern[str]
    beginnings: frozenset[str]
    longest: int

    @classmethod
    def of(cls, texts: Iterable[str]) -> Marks:
        ordered = sorted(texts, key=len, reverse=True)
        beginnings = frozenset(text[:n] for text in ordered for n in range(1, len(text)))
        return cls(re.compile("|".join(map(re.escape, ordered))), beginnings, len(ordered[0]))

    def find(self, text: str) -> re.Match[str] | None:
        return self.pattern.search(text)

    def settled(self, text: str) -> int:
        """How much of `text`, which contains no mark, can never become part of one."""
        for held in range(min(self.longest - 1, len(text)), 0, -1):
            if text[-held:] in self.beginnings:
                return len(text) - held
        return len(text)
