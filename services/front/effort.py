"""How hard to think, in words that clients of different APIs use, as the level that a checkpoint has.

Pure; the levels' texts belong to the checkpoint (services.front.chat.format).
"""

from __future__ import annotations

from collections.abc import Collection

# In order of strength.
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
# As DeepSeek's own API reads the words that it has no level for.
_SYNONYMS = {"minimal": "low", "medium": "low", "xhigh": "high"}
# A checkpoint without a text for these reasons in its ordinary way.
_ORDINARY = ("low", "high")


def effort_level(asked: str | None, levels: Collection[str | None]) -> str | None:
    """The checkpoint's level for a word; a word that it cannot be is given back, to be refused by name."""
    word = asked if asked is None or asked in levels else _SYNONYMS.get(asked, asked)
    return None if word in _ORDINARY and word not in levels else word
