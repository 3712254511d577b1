"""The demo's training stream: conversations of every kind as rows of token ids with loss weights.

Everything follows from a seed. Owns the mixture and the packing into rows; what is said is in `tasks`, `stories` and
`recall`, the format in the chat encoder of the front service, which is the one that asks the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from demo import recall, tasks
from demo.tasks import Conversation
from services.front.chat.encoding import ChatOptions, ThinkingMode, encode_chat
from services.front.chat.format import ASSISTANT, EOS, ChatFormat, format_from_constants, read_constants
from services.front.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
SHORT, LONG = 512, 3328

# Loss weights in sixteenths: what the model says, and what others say.
_OWN, _OTHERS = 16, 2

Task = Callable[..., Conversation]
_MIXTURE: tuple[tuple[Task, float], ...] = (
    (tasks.arithmetic, 14.0),
    (tasks.letters, 1.5),
    (tasks.small_talk, 1.0),
    (tasks.storytelling, 2.0),
    (tasks.story_questions, 2.0),
    (tasks.remembered_name, 2.0),
    (tasks.chain, 1.0),
    (tasks.tool_call, 2.0),
    (tasks.tool_answer, 0.7),
)


class Row(NamedTuple):
    """`ids` uint16 and `weights` uint8 (sixteenths, of the loss of predicting this very token), both [length]."""

    ids: NDArray[np.uint16]
    weights: NDArray[np.uint8]


def chat_format() -> ChatFormat:
    return format_from_constants(read_constants((HERE / "encoding_dsv4.py").read_text(encoding="utf-8")))


class Renderer:
    """Conversations to token ids, by one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._format = chat_format()
        self._assistant, self._eos = tokenizer.control_id(ASSISTANT), tokenizer.control_id(EOS)

    def prompt(self, conversation: Conversation, *, answer: bool, effort: str | None = None) -> list[int]:
        """With the last message, the right answer, or up to where the model begins to speak."""
        messages = list(conversation.messages if answer else conversation.messages[:-1])
        if conversation.tools:
            messages = [{"role": "system", "content": "", "tools": list(conversation.tools)}, *messages]
        mode = ThinkingMode.THINKING if conversation.thinking else ThinkingMode.CHAT
        segments = encode_chat(messages, self._format, ChatOptions(mode, effort=effort))
        return self.tokenizer.encode((s.text, s.trusted) for s in segments)

    def weigh(self, ids: list[int]) -> list[int]:
        """Full weight from after the assistant's mark and mode token to the end mark, little elsewhere."""
        weights, inside = [], 0
        for token in ids:
            weights.append(_OWN if inside == 1 else _OTHERS)
            if token == self._assistant:
                inside = 2
            elif token == self._eos:
                inside = 0
            elif inside == 2:  # the mode token that the prompt ends with
                inside = 1
        return weights


def short_conversation(rng: Random) -> Conversation:
    task = rng.choices([t for t, _ in _MIXTURE], [w for _, w in _MIXTURE])[0]
    if rng.random() < 0.25:
        return recall.planted(rng, rng.randrange(1, 7), rng.randrange(2, 20), rng.randrange(1, 6))
    return task(rng, evaluation=False)


def long_conversation(rng: Random) -> Conversation:
    """Up to about 2,900 tokens of text, then questions until the row is full."""
    sentences = int(rng.triangular(20, 235, 200))
    return recall.planted(rng, rng.randrange(4, 4 + sentences // 6), sentences, 110)


def _encode(renderer: Renderer, rng: Random, conversation: Conversation) -> tuple[list[int], list[int]]:
    # Any conversation can be had with thinking on; most people leave it off.
    if not conversation.thinking and conversation.category not in ("arithmetic", "chain") and rng.random() < 0.1:
        conversation = tasks.with_thinking(conversation)
    effort = rng.choice(("high", "max")) if conversation.thinking and rng.random() < 0.1 else None
    ids = renderer.prompt(conversation, answer=True, effort=effort)
    return ids, renderer.weigh(ids)


def rows(renderer: Renderer, seed: int, length: int) -> Iterator[Row]:
    """Endless rows of one length. Short rows hold several conversations, one after the other; long ones mostly one."""
    rng = Random(f"{seed} {length}")
    draw = long_conversation if length > SHORT else short_conversation
    while True:
        ids: list[int] = []
        weights: list[int] = []
        while len(ids) < length:
            more, weighed = _encode(renderer, rng, draw(rng))
            ids += more
            weights += weighed
        yield Row(np.array(ids[:length], np.uint16), np.array(weights[:length], np.uint8))
