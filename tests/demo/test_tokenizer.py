"""Facts of the demo's tokenizer that its model and the chat format rely on."""

from __future__ import annotations

import pytest

from demo.corpus import HERE
from demo.model import VOCAB_SIZE
from demo.words import COLOURS, NAMES, SECRETS, THINGS
from services.front.chat.format import ESSENTIAL_TOKENS
from services.front.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(HERE)


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode([("What is 307 + 45?", False)])
    texts = [tokenizer.token_bytes(i) for i in ids]
    assert [t for t in texts if any(c in b"0123456789" for c in t)] == [b"3", b"0", b"7", b"4", b"5"]


def test_control_tokens_are_single_and_begin_at_zero(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.control_id(token) for token in ESSENTIAL_TOKENS]
    assert ids[:2] == [0, 1]
    assert None not in ids
    assert tokenizer.control_id("｜DSML｜") is not None


def test_every_text_survives(tokenizer: Tokenizer) -> None:
    text = "Größe 12, «naïve» 日本 \n\t\0 emoji 🦊."
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode([(text, False)]))).decode() == text


@pytest.mark.parametrize("word", [*COLOURS, *THINGS, *SECRETS, *NAMES])
def test_words_of_facts_are_single_tokens(tokenizer: Tokenizer, word: str) -> None:
    assert len(tokenizer.encode([(f" {word}", False)])) == 1


def test_it_fits_the_model_and_its_checkpoint(tokenizer: Tokenizer) -> None:
    assert tokenizer.size <= VOCAB_SIZE
    assert VOCAB_SIZE % 128 == 0
    assert (HERE / "checkpoint" / "tokenizer.json").read_bytes() == (HERE / "tokenizer.json").read_bytes()
