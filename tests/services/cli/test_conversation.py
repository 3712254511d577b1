import io
import json

import pytest

from services.cli.conversation import Answer, Conversation, Sampling
from services.cli.terminal import AnswerPrinter, harmless
from shared.protocol.messages import TextChunk


def chunk(text="", reasoning="", calls="", finish=""):
    return TextChunk(text, reasoning, calls, finish, 0, 0, 0, 0.0, 0.0)


def answered(text):
    return Answer(text=text)


def roles(conversation):
    return [message["role"] for message in conversation.messages]


def test_requests_carry_everything_before():
    conversation = Conversation(Sampling(5, 0.5, 0.9, 3), system="Be brief.")
    conversation.keep("one", answered("eins"))
    chat = conversation.request("two")
    assert [m["content"] for m in json.loads(chat.messages_json)] == ["Be brief.", "one", "eins", "two"]
    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.seed, chat.options_json) == (5, 0.5, 0.9, 3, "{}")
    assert roles(conversation) == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("think", "options"),
    [(None, {}), ("on", {"thinking": True}), ("high", {"thinking": True, "reasoning_effort": "high"})],
)
def test_thinking(think, options):
    assert json.loads(Conversation(Sampling(think=think)).request("x").options_json) == options


def test_an_empty_answer_leaves_no_trace():
    conversation = Conversation(Sampling())
    conversation.keep("one", Answer())
    assert conversation.messages == []


def test_reasoning_and_calls_are_kept():
    conversation = Conversation(Sampling())
    conversation.keep("one", Answer("t", "r", '[{"id": "1"}]'))
    assert conversation.messages[-1] == {
        "role": "assistant",
        "content": "t",
        "reasoning_content": "r",
        "tool_calls": [{"id": "1"}],
    }


def test_take_back_and_clear():
    conversation = Conversation(Sampling(), system="s")
    assert conversation.take_back() is None
    conversation.keep("one", answered("1"))
    conversation.keep("two", answered("2"))
    assert conversation.take_back() == "two"
    assert roles(conversation) == ["system", "user", "assistant"]
    conversation.clear()
    assert roles(conversation) == ["system"]


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_the_text_as_it_is():
    out, aside = io.StringIO(), io.StringIO()
    printer = AnswerPrinter(out, aside, Answer())
    for piece in (chunk(reasoning="hm"), chunk("a\x1b[2J"), chunk("b", finish="stop")):
        printer.chunk(piece)
    assert (out.getvalue(), aside.getvalue()) == ("a\x1b[2Jb\n", "hm")
    assert (printer.answer.text, printer.answer.reasoning) == ("a\x1b[2Jb", "hm")


def test_a_screen_gets_dim_reasoning_and_no_control_characters():
    out = Screen()
    printer = AnswerPrinter(out, io.StringIO(), Answer())
    for piece in (
        chunk(reasoning="h\x07"),
        chunk(reasoning="m"),
        chunk("a\x1b[2J\n"),
        chunk(calls="[]", finish="stop"),
    ):
        printer.chunk(piece)
    assert out.getvalue() == "\x1b[2mh␇m\x1b[0m\n\na␛[2J\ntool calls: []\n"


def test_harmless():
    assert harmless("a\tb\nc\x00\x7f\x9bé🐈") == "a\tb\nc␀␡\ufffdé🐈"
