"""The built-in tokenizer: loadable by the library, complete, and lossless."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from shared.checkpoint.synth_tokenizer import CONTROL_TOKENS, LEADING_TOKENS, tokenizer_files, train_merges


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(512)["tokenizer.json"]))


@pytest.mark.parametrize(
    "text", ["Hello, 1234 worlds", "naïve Ærø, 日本 🙂", "  tabs\t\n\n", "<｜User｜>hi<｜Assistant｜></think>"]
)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_id_has_a_token_and_control_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 512
    assert None not in [tokenizer.id_to_token(i) for i in range(512)]
    assert [tokenizer.token_to_id(token) for token in LEADING_TOKENS] == [0, 1, 2]
    for token in CONTROL_TOKENS:
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]


def test_merges_are_learnt_most_frequent_first() -> None:
    assert train_merges("abab abab ab", 2) == [("a", "b"), ("ab", "ab")]


def test_a_text_too_short_is_filled_up() -> None:
    merges = train_merges("zz", 40)
    assert len({left + right for left, right in merges}) == 40
