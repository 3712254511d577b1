"""Token ids to text as they come, never half a character.

The bytes of an unfinished character are held back until it is complete, or can no longer become one. Constant work
per token; knows no model.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """One stream of tokens. `token_bytes` maps an id to what it stands for."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut off."""
        return self._decoder.decode(b"", final=True)
