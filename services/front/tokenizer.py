"""Text to token ids and ids to bytes, by the checkpoint's own tokenizer.json.

Control tokens are recognised only where the caller says so: in everything else they are ordinary letters. Knows the
byte-level family of tokenizers and refuses others; knows nothing of chats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from shared.errors import CheckpointError


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE writes for the 256 bytes (the scheme of GPT-2's vocabulary).

    Printable Latin-1 letters stand for themselves; the other bytes take the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_letters()


class Tokenizer:
    """A loaded tokenizer.json.

    `size` is one more than the largest id; `longest` the most bytes that one token stands for, so that a text has at
    least its bytes over this many tokens.
    """

    def __init__(self, source: str) -> None:
        """Raises:
        ValueError: not a byte-level tokenizer in the format of the `tokenizers` package.
        """
        table = json.loads(source)
        if not isinstance(table, dict) or not _is_byte_level(table.get("decoder")):
            raise ValueError("only byte-level tokenizers are supported, and its decoder is not one")
        added = {entry["content"]: entry["id"] for entry in table.get("added_tokens", [])}
        # Without its added tokens the library treats every text as ordinary text.
        self._plain = _Tokenizer.from_str(json.dumps(table | {"added_tokens": []}))
        self._control_ids: dict[str, int] = added
        texts = {id_: text for vocab in (self._plain.get_vocab(), added) for text, id_ in vocab.items()}
        self.size = 1 + max(texts, default=-1)
        self.longest = max((len(text.encode()) for text in texts.values()), default=1)
        self._bytes = [_token_bytes(texts.get(id_, "")) for id_ in range(self.size)]
        longest_first = sorted(added, key=len, reverse=True)
        self._controls = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None

    @classmethod
    def load(cls, checkpoint: Path) -> Tokenizer:
        """The tokenizer of a checkpoint directory.

        Raises:
            CheckpointError: the file is missing, or is not a tokenizer that can be used.
        """
        path = checkpoint / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot read the tokenizer ({error.strerror})") from error
        except Exception as error:  # `tokenizers` raises bare Exception for a file that it cannot use
            raise CheckpointError(f"{path}: not a usable tokenizer: {error}") from error

    def control_id(self, text: str) -> int | None:
        """The id of a control token; None if this tokenizer does not have it as one token."""
        return self._control_ids.get(text)

    def encode(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of a text given as (stretch, whether control tokens in it count).

        Stretches join before they are split into tokens: only a control token that counts is a border.
        """
        ids: list[int] = []
        run: list[str] = []
        for text, trusted in segments:
            for i, part in enumerate(self._controls.split(text) if trusted and self._controls else [text]):
                if i % 2 == 0:
                    run.append(part)
                    continue
                ids += self._encode_plain("".join(run))
                run.clear()
                ids.append(self._control_ids[part])
        return ids + self._encode_plain("".join(run))

    def _encode_plain(self, text: str) -> list[int]:
        """By the call for many texts: that for a single one lets no other thread run meanwhile."""
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; nothing for an id that the tokenizer does not know."""
        return self._bytes[token_id] if 0 <= token_id < self.size else b""


def _token_bytes(text: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, text))
    except KeyError:  # a control token
        return text.encode()


def _is_byte_level(decoder: Any) -> bool:
    """Whether this entry of tokenizer.json is a ByteLevel decoder, alone or as the only one of a sequence."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        decoders = decoder.get("decoders", [])
        return len(decoders) == 1 and _is_byte_level(decoders[0])
    return decoder.get("type") == "ByteLevel"
