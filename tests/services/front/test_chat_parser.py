import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.front.chat.dsml import CompletedCall
from services.front.chat.format import DSML, END_THINK, EOS, THINK
from services.front.chat.parser import CompletionParser
from services.front.chat.strict import MalformedCompletion, parse_strict

CASES = json.loads((Path(__file__).parents[2] / "golden" / "chat" / "parse.json").read_text(encoding="utf-8"))
STRICT = [case for case in CASES if not case["tolerant"]]
TOLERANT = [case for case in CASES if case["tolerant"]]


def is_thinking(case):
    return case["thinking_mode"] == "thinking"


def read(pieces, *, thinking, reason="length", schemas=None):
    """(reasoning, text, calls, finish reason) of a completion that comes in these pieces."""
    parser = CompletionParser(thinking=thinking, schemas=schemas)
    deltas = [parser.feed(piece) for piece in pieces]
    ending = parser.finish(reason)
    deltas.append(ending.delta)
    reasoning, text = "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)
    return reasoning, text, [call for d in deltas for call in d.calls], ending.finish_reason


def calls_of(expected):
    return [CompletedCall(c["function"]["name"], c["function"]["arguments"]) for c in expected["tool_calls"]]


def with_values(calls):
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("case", STRICT, ids=lambda case: case["name"])
def test_strict_reading_is_the_vendors(case):
    if "expected_error" in case:
        with pytest.raises(MalformedCompletion):
            parse_strict(case["text"], thinking=is_thinking(case))
        return
    result, expected = parse_strict(case["text"], thinking=is_thinking(case)), case["expected"]
    assert (result.content, result.reasoning) == (expected["content"], expected["reasoning_content"])
    assert list(result.calls) == calls_of(expected)


@pytest.mark.parametrize("case", TOLERANT, ids=lambda case: case["name"])
def test_tolerant_reading(case):
    reasoning, text, calls, reason = read([case["text"]], thinking=is_thinking(case))
    expected = case["expected"]
    assert (text, reasoning, reason) == (
        expected["content"],
        expected["reasoning_content"],
        expected["finish_reason"],
    )
    assert with_values(calls) == with_values(calls_of(expected))


@pytest.mark.parametrize("case", [c for c in TOLERANT if c["strict"] != "ok"], ids=lambda case: case["name"])
def test_strict_reading_refuses_what_is_malformed(case):
    with pytest.raises(MalformedCompletion):
        parse_strict(case["text"], thinking=is_thinking(case))


@pytest.mark.parametrize("case", [c for c in STRICT if "expected" in c], ids=lambda case: case["name"])
def test_tolerant_reading_of_well_formed_text_is_the_strict_one(case):
    reasoning, text, calls, reason = read([case["text"]], thinking=is_thinking(case))
    strict = parse_strict(case["text"], thinking=is_thinking(case))
    assert (reasoning, text) == (strict.reasoning, strict.content)
    assert calls == list(strict.calls)
    assert reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_letter_by_letter_is_the_same(case):
    whole = read([case["text"]], thinking=is_thinking(case))
    assert read(case["text"], thinking=is_thinking(case)) == whole


def block(*invokes, name="tool_calls"):
    return f"\n\n<{DSML}{name}>\n" + "\n".join(invokes) + f"\n</{DSML}{name}>"


def invoke(name, *parameters):
    return f'<{DSML}invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{DSML}invoke>"


def parameter(name, value, string="true"):
    return f'<{DSML}parameter name="{name}" string="{string}">{value}</{DSML}parameter>'


NOW = CompletedCall("now", "{}")
NOTE = CompletedCall("note", '{"text": "a"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", ("", "", [], "length"), id="nothing"),
        pytest.param("a <b", ("", "a <b", [], "length"), id="held back text comes at the end"),
        pytest.param(f"{THINK}r{END_THINK}t{EOS}", ("r", "t", [], "stop"), id="reasoning opened by the model"),
        pytest.param("<thi", ("", "<thi", [], "length"), id="half a tag at the start"),
        pytest.param(f"a{EOS}b", ("", "a", [], "stop"), id="text after the end"),
        pytest.param(invoke("now"), ("", "", [NOW], "length"), id="call without a block"),
        pytest.param(block(invoke("now")) + "more", ("", "", [NOW], "tool_calls"), id="text after the block"),
        pytest.param("a" + block(), ("", "a", [], "stop"), id="empty block"),
        pytest.param(f"a\n\n<{DSML}tool_calls>\n", ("", "a", [], "length"), id="block cut before a call"),
        pytest.param(f"a\n\n<{DSML}tool_calls>\n</{DSML}", ("", "a", [], "length"), id="block cut in a tag"),
        pytest.param(f"a <{DSML}> b", ("", f"a <{DSML}> b", [], "length"), id="marker in plain text"),
        pytest.param(
            f"a <{DSML}x> b </{DSML}x> c{EOS}", ("", f"a <{DSML}x> b </{DSML}x> c", [], "stop"), id="block of text"
        ),
        pytest.param(
            block(invoke("now"), f"</{DSML}parameter>", invoke("now")),
            ("", "", [NOW, NOW], "tool_calls"),
            id="stray tag between calls",
        ),
        pytest.param(
            block(invoke("note", f"</{DSML}parameter>", parameter("text", "a"))),
            ("", "", [NOTE], "tool_calls"),
            id="stray tag in a call",
        ),
        pytest.param(
            f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="now">\n</{DSML}tool_calls>',
            ("", "", [NOW], "tool_calls"),
            id="call closed by its block",
        ),
        pytest.param(
            f'<{DSML}invoke name="now">\n<{DSML}invoke name="now">\n</{DSML}invoke>',
            ("", "", [NOW, NOW], "length"),
            id="call closed by the next",
        ),
        pytest.param(
            f'<{DSML}invoke name="note">\n<{DSML}parameter name="text" string="true">a</{DSML}invoke>',
            ("", "", [NOTE], "length"),
            id="parameter closed by its call",
        ),
        pytest.param(f'<{DSML}invoke name="now">\n{EOS}', ("", "", [], "stop"), id="call cut by the end mark"),
        pytest.param(f"<{DSML}invoke>\n</{DSML}invoke>{EOS}", ("", "", [], "stop"), id="call without a name"),
        pytest.param(
            block(invoke("note", parameter("text", "b"), parameter("text", "a"))),
            ("", "", [NOTE], "tool_calls"),
            id="the last of two equal parameters counts",
        ),
        pytest.param(
            block(invoke("f", parameter("x", "NaN", "false"))),
            ("", "", [CompletedCall("f", '{"x": "NaN"}')], "tool_calls"),
            id="NaN is not JSON",
        ),
        pytest.param(
            block(invoke("f", parameter("x", "[" * 100_000, "false"))),
            ("", "", [CompletedCall("f", '{"x": "' + "[" * 100_000 + '"}')], "tool_calls"),
            id="too deep to be JSON",
        ),
    ],
)
def test_forgives(text, expected):
    assert read([text], thinking=False) == expected
    assert read(text, thinking=False) == expected


def test_schema_decides_about_an_unmarked_value():
    text = block(invoke("f", f'<{DSML}parameter name="x">12</{DSML}parameter>'))
    schema = {"properties": {"x": {"type": "string"}}}
    assert read([text], thinking=False)[2] == [CompletedCall("f", '{"x": 12}')]
    assert read([text], thinking=False, schemas={"f": schema})[2] == [CompletedCall("f", '{"x": "12"}')]


def test_a_function_may_really_have_arguments():
    text = block(invoke("f", parameter("arguments", '{"a": 1}', "false")))
    schema = {"properties": {"arguments": {"type": "object"}}}
    assert read([text], thinking=False, schemas={"f": schema})[2] == [CompletedCall("f", '{"arguments": {"a": 1}}')]


def test_text_comes_at_once_unless_it_may_be_a_mark():
    parser = CompletionParser(thinking=False)
    assert parser.feed("one two\n").text == "one two"
    assert parser.feed("\n").text == ""
    assert parser.feed("\n").text == "\n"
    assert parser.feed("x <").text == "\n\nx "
    assert parser.feed("y").text == "<y"


def test_a_call_comes_when_it_is_closed():
    parser = CompletionParser(thinking=False)
    assert parser.feed(f"\n\n<{DSML}tool_calls>\n" + invoke("now")[:-1]).calls == ()
    assert parser.feed(">").calls == (NOW,)
    assert not parser.finished
    parser.feed(f"\n</{DSML}tool_calls>")
    assert parser.finished


@pytest.mark.parametrize(("reason", "expected"), [("stop", "stop"), ("length", "length"), ("abort", "abort")])
def test_finish_reason_of_plain_text_is_the_generators(reason, expected):
    assert read(["a"], thinking=False, reason=reason)[3] == expected


FRAGMENTS = [
    *[THINK, END_THINK, EOS, DSML, "\n", "\n\n", " ", "<", ">", "/", "a", "é🐈", '"', "{", "}", "1", "null"],
    *[f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", f"<{DSML}", f"</{DSML}", f"<{DSML}tool>"],
    *[f"<{DSML}invoke", f"</{DSML}invoke>", ' name="f"', ">\n", invoke("now"), block(invoke("now"))],
    *[f"<{DSML}parameter", f"</{DSML}parameter>", ' string="true"', ' string="false"', parameter("x", "1", "false")],
]
completions = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


@given(completions, st.data(), st.booleans(), st.sampled_from(["stop", "length", "abort"]))
def test_cutting_changes_nothing(text, data, thinking, reason):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read([text], thinking=thinking, reason=reason)
    assert read(pieces, thinking=thinking, reason=reason) == whole
    for call in whole[2]:
        assert isinstance(json.loads(call.arguments), dict)


@given(completions, st.booleans())
def test_well_formed_text_reads_the_same_strictly(text, thinking):
    try:
        strict = parse_strict(text, thinking=thinking)
    except MalformedCompletion:
        return
    reasoning, content, calls, _ = read([text], thinking=thinking, reason="stop")
    assert (reasoning, content) == (strict.reasoning, strict.content)
    assert [call.name for call in calls] == [call.name for call in strict.calls]


def test_work_per_piece_does_not_grow():
    """Only what may still become a mark is looked at again, however long the value is."""
    parser = CompletionParser(thinking=False)
    parser.feed(f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="x" string="true">')
    most = 0
    for _ in range(100_000):
        parser.feed("<")
        most = max(most, len(parser._block.rest))
    assert most < 40
