import io
import json

import pytest

from services.cli.conversation import Answer, Conversation, Sampling
from services.cli.markdown import MarkdownWriter
from services.cli.terminal import AnswerPrinter, PlainWriter, harmless, text_writer, well_formed
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


CALL = {"id": "7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 3}'}}


def test_results_of_tools_are_a_question_in_themselves():
    conversation = Conversation(Sampling(), tools=[{"function": {"name": "weather"}}])
    conversation.keep("Is it warm?", Answer(tool_calls_json=json.dumps([CALL])))
    conversation.add_result(CALL, "12 degrees")
    chat = conversation.request(None)
    assert json.loads(chat.messages_json)[2:] == [{"role": "tool", "tool_call_id": "7", "content": "12 degrees"}]
    assert json.loads(chat.options_json) == {"tools": [{"function": {"name": "weather"}}]}
    conversation.keep(None, answered("No."))
    assert roles(conversation) == ["user", "assistant", "tool", "assistant"]
    assert conversation.take_back() == "Is it warm?"
    assert conversation.messages == []


class Screen(io.StringIO):
    def isatty(self):
        return True


def printed(out, aside, *chunks):
    printer = AnswerPrinter(out, aside, PlainWriter(out), Answer())
    for piece in chunks:
        printer.chunk(piece)
    return printer.answer


def test_a_pipe_gets_the_text_as_it_is():
    out, aside = io.StringIO(), io.StringIO()
    answer = printed(out, aside, chunk(reasoning="hm"), chunk("a\x1b[2J"), chunk("b", finish="stop"))
    assert (out.getvalue(), aside.getvalue()) == ("a\x1b[2Jb\n", "hm")
    assert (answer.text, answer.reasoning) == ("a\x1b[2Jb", "hm")


def test_a_screen_gets_dim_reasoning_and_no_control_characters():
    out = Screen()
    calls = json.dumps([CALL, {"function": {"name": "f", "arguments": "{no\x07"}}])
    pieces = chunk(reasoning="h\x07"), chunk(reasoning="m"), chunk("a\x1b[2J"), chunk(calls=calls, finish="stop")
    printed(out, io.StringIO(), *pieces)
    assert out.getvalue() == ('\x1b[2mh␇m\x1b[0m\n\na␛[2J\n-> weather(city="Oslo", days=3)\n-> f({no␇)\n')


def test_markdown_needs_a_terminal_that_shows_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(text_writer(Screen(), plain=False), MarkdownWriter)
    assert isinstance(text_writer(Screen(), plain=True), PlainWriter)
    assert isinstance(text_writer(io.StringIO(), plain=False), PlainWriter)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(text_writer(Screen(), plain=False), PlainWriter)


def test_harmless():
    assert harmless("a\tb\nc\x00\x7f\x9bé🐈") == "a\tb\nc␀␡\ufffdé🐈"


@pytest.mark.parametrize(
    ("typed", "text"),
    [(b"plain \xc3\xbc \xf0\x9f\x98\x80", "plain \u00fc \U0001f600"), (b"h\xffx\xc3", "h\ufffdx\ufffd"), (b"", "")],
)
def test_what_was_typed_can_be_sent(typed, text):
    assert well_formed(typed.decode("utf-8", "surrogateescape")) == text
    assert well_formed("\ud800") == "\ufffd"
