"""Where the front says that a prompt may be cut: the positions that later requests of the conversation share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_worker import make_checkpoint

from services.front.chat.format import ASSISTANT, USER, ChatFormat
from services.front.chat_message import request_of
from services.front.prompt import PromptMaker
from services.front.tokenizer import Tokenizer
from shared.protocol.messages import Chat, Generate

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "ab"}
SAID = {"role": "assistant", "content": "cd", "reasoning_content": "ef"}
SECOND = {"role": "user", "content": f"{ASSISTANT}{USER}"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_checkpoint(Path(tmp_path_factory.mktemp("front")) / "checkpoint"))


def prompt(tokenizer: Tokenizer, *messages: dict[str, Any], **options: Any) -> Generate:
    maker = PromptMaker(tokenizer, ChatFormat(), 4096, 16)
    return maker.make(request_of(Chat(json.dumps(messages), 0, options_json=json.dumps(options)))).generate


def test_before_the_first_question_and_where_answers_begin(tokenizer: Tokenizer) -> None:
    made = prompt(tokenizer, SYSTEM, FIRST, SAID, SECOND)
    user, assistant = tokenizer.control_id(USER), tokenizer.control_id(ASSISTANT)
    first, *answers = made.boundaries
    assert made.prompt_ids[first] == user
    assert user not in made.prompt_ids[:first]
    assert [made.prompt_ids[end - 1] for end in answers] == [assistant] * 2
    assert made.prompt_ids.count(assistant) == 2, "what a person types is no boundary"


def test_a_longer_conversation_keeps_the_boundaries_that_it_had(tokenizer: Tokenizer) -> None:
    """Reasoning that is forgotten later comes after the boundary."""
    for options in ({}, {"thinking": True}, {"thinking": True, "drop_thinking": False}):
        before = prompt(tokenizer, SYSTEM, FIRST, **options)
        after = prompt(tokenizer, SYSTEM, FIRST, SAID, SECOND, **options)
        assert after.boundaries[: len(before.boundaries)] == before.boundaries
        shared = before.boundaries[-1]
        assert after.prompt_ids[:shared] == before.prompt_ids[:shared]
        assert shared == len(before.prompt_ids) - 1


def test_they_rise_inside_the_prompt(tokenizer: Tokenizer) -> None:
    made = prompt(tokenizer, FIRST)
    assert made.boundaries == tuple(sorted(set(made.boundaries)))
    assert all(0 < end <= len(made.prompt_ids) for end in made.boundaries)


@pytest.mark.parametrize("trust", [False, True])
def test_control_tokens_in_messages_count_only_where_the_config_says_so(tokenizer: Tokenizer, trust: bool) -> None:
    maker = PromptMaker(tokenizer, ChatFormat(), 4096, 16, trust_control_tokens=trust)
    request = request_of(Chat(json.dumps([SECOND]), 0))
    for made in (maker, maker.without_limit()):
        ids = made.make(request).generate.prompt_ids
        assert ids.count(tokenizer.control_id(USER)) == 1 + trust
        assert ids.count(tokenizer.control_id(ASSISTANT)) == 1 + trust
