import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.front.chat.dsml import ArgumentsPiece, CallBegun, CompletedCall, read_name, read_parameter
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
    calls = [event for d in deltas for event in d.calls if isinstance(event, CompletedCall)]
    return reasoning, text, calls, ending.finish_reason


def told(pieces, *, schemas=None):
    """[name, arguments as told, whether the call was completed] of each call; the pieces joined."""
    parser = CompletionParser(thinking=False, schemas=schemas)
    calls = []
    for event in [event for piece in pieces for event in parser.feed(piece).calls]:
        match event:
            case CallBegun(name):
                assert all(is_done for _, _, is_done in calls), "calls do not interleave"
                calls.append([name, "", False])
            case ArgumentsPiece(text):
                assert text
                assert not calls[-1][2]
                calls[-1][1] += text
            case CompletedCall(name):
                assert name == calls[-1][0]
                calls[-1][2] = True
    assert parser.finish("length").delta.calls == ()
    return calls


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


def test_work_of_the_strict_reading_does_not_grow_faster_than_the_text():
    """A parameter of a million letters that could end at every sixteenth, and never does; it would take minutes."""
    text = block(invoke("f", f'<{DSML}parameter name="x' + '" string="true">' * 60_000 + f"/{DSML}parameter>"))
    with pytest.raises(MalformedCompletion, match="a closing tag without its <"):
        parse_strict(text + EOS, thinking=False)


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
NAMELESS = block(f'<{DSML}invoke nme="note">\n{parameter("text", "a")}\n</{DSML}invoke>')


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
        pytest.param(f"<{DSML}invoke>\n</{DSML}invoke>{EOS}", ("", "", [], "stop"), id="call of nothing but tags"),
        pytest.param(NAMELESS + EOS, ("", NAMELESS, [], "stop"), id="call without a name"),
        pytest.param(NAMELESS + "more", ("", NAMELESS + "more", [], "length"), id="text after a call without a name"),
        pytest.param(NAMELESS[:-40], ("", "", [], "length"), id="call without a name cut off"),
        pytest.param(f'<{DSML}invoke name="no', ("", "", [], "length"), id="call cut in its name"),
        pytest.param(
            block(f"<{DSML}invoke>now</{DSML}invoke>", invoke("now")),
            ("", "", [NOW], "tool_calls"),
            id="one has a name",
        ),
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


def test_a_call_is_told_while_it_is_written():
    parser = CompletionParser(thinking=False)
    parser.feed(f"\n\n<{DSML}tool_calls>\n<{DSML}invoke")
    assert parser.feed(' name="note"').calls == ()
    assert parser.feed(">").calls == (CallBegun("note"),)
    assert parser.feed(f'\n<{DSML}parameter name="text" string="true"').calls == ()
    assert parser.feed(">say ").calls == (ArgumentsPiece('{"text": "say '),)
    assert parser.feed('"hi"\n').calls == (ArgumentsPiece('\\"hi\\"\\n'),)
    assert parser.feed("🐈</").calls == (ArgumentsPiece("🐈"),)
    assert parser.feed("b>").calls == (ArgumentsPiece("</b>"),)
    assert parser.feed(f"</{DSML}parameter>").calls == (ArgumentsPiece('"'),)
    assert parser.feed(f'\n<{DSML}parameter name="n" string="false">[1').calls == ()
    assert parser.feed(f", 2]</{DSML}parameter>").calls == (ArgumentsPiece(', "n": [1, 2]'),)
    assert parser.feed(f"\n</{DSML}invoke").calls == ()
    whole = '{"text": "say \\"hi\\"\\n🐈</b>", "n": [1, 2]}'
    assert parser.feed(">").calls == (ArgumentsPiece("}"), CompletedCall("note", whole))
    assert not parser.finished
    parser.feed(f"\n</{DSML}tool_calls>")
    assert parser.finished


TEXT = parameter("x", 'a "b"')


@pytest.mark.parametrize(
    ("parameters", "schema", "first"),
    [
        pytest.param([TEXT], None, '{"x": "', id="text"),
        pytest.param([f'<{DSML}parameter name="x">a</{DSML}parameter>'], "string", '{"x": "', id="text by the schema"),
        pytest.param([f'<{DSML}parameter name="x">12</{DSML}parameter>'], None, '{"x": 12', id="it says not what"),
        pytest.param([parameter("x", "no", "false")], None, '{"x": "no"', id="no JSON"),
        pytest.param([parameter("arguments", '{"a": 1}')], None, '{"a": 1}', id="the object itself"),
        pytest.param([parameter("arguments", "no")], None, '{"arguments": "no"}', id="no object"),
        pytest.param([parameter("arguments", "{}"), TEXT], None, '{"arguments": "{}", "x": "', id="not alone"),
        pytest.param([TEXT, parameter("arguments", "{}")], None, '{"x": "', id="not alone, behind"),
        pytest.param([parameter("n" * 2_000, "a")], None, '{"' + "n" * 2_000 + '": "a"', id="a tag that is too long"),
    ],
)
def test_how_arguments_are_told(parameters, schema, first):
    """`first` is their first piece, when they come letter by letter."""
    schemas = {"f": {"properties": {"x": {"type": schema}}}} if schema else None
    text = block(invoke("f", *parameters))
    ((name, arguments, is_done),) = told(text, schemas=schemas)
    assert ([CompletedCall(name, arguments)], is_done) == (read([text], thinking=False, schemas=schemas)[2], True)
    parser = CompletionParser(thinking=False, schemas=schemas)
    pieces = [e.text for c in text for e in parser.feed(c).calls if isinstance(e, ArgumentsPiece)]
    assert pieces[0] == first


def test_a_parameter_that_comes_twice_is_told_twice_and_counts_once():
    text = block(invoke("note", parameter("text", "b"), parameter("text", "a")))
    assert told(text) == [["note", '{"text": "b", "text": "a"}', True]]
    assert read(text, thinking=False)[2] == [NOTE]


def test_a_call_that_is_cut_off_is_told_and_does_not_count():
    text = block(invoke("now"), invoke("note", parameter("text", "abc")))
    cut = text[: text.index("abc") + 2]
    assert told(cut) == [["now", "{}", True], ["note", '{"text": "ab', False]]
    assert read(cut, thinking=False) == ("", "", [NOW], "length")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_pieces_are_the_arguments(case):
    text = case["text"].split(END_THINK)[-1]
    done = [CompletedCall(name, arguments) for name, arguments, is_done in told(text) if is_done]
    if case["name"] != "call_duplicate_parameter":
        assert done == read([text], thinking=False)[2]
    assert told([text]) == told(text)


@pytest.mark.parametrize(("reason", "expected"), [("stop", "stop"), ("length", "length"), ("abort", "abort")])
def test_finish_reason_of_plain_text_is_the_generators(reason, expected):
    assert read(["a"], thinking=False, reason=reason)[3] == expected


FRAGMENTS = [
    *[THINK, END_THINK, EOS, DSML, "\n", "\n\n", " ", "<", ">", "/", "a", "é🐈", '"', "{", "}", "1", "null"],
    *[f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", f"<{DSML}", f"</{DSML}", f"<{DSML}tool>"],
    *[f"<{DSML}invoke", f"</{DSML}invoke>", ' name="f"', ">\n", invoke("now"), block(invoke("now"))],
    *[f"<{DSML}parameter", f"</{DSML}parameter>", ' string="true"', ' string="false"', parameter("x", "1", "false")],
    *[parameter("x", 'a "b"\n'), parameter("arguments", "{}"), ' name="x" string="true">'],
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


@given(completions, st.data())
def test_cutting_changes_nothing_that_is_told(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    calls = told([text])
    assert told(pieces) == calls
    done = [(name, json.loads(arguments)) for name, arguments, is_done in calls if is_done]
    assert done == with_values(read([text], thinking=False)[2])


@given(
    st.dictionaries(st.text("ab", min_size=1), st.tuples(st.text('"\\\n<{a🐈\x00'), st.sampled_from(["true", "false"])))
)
def test_pieces_of_any_values_are_the_arguments(parameters):
    text = block(invoke("f", *(parameter(name, *value) for name, value in parameters.items())))
    (call,) = read([text], thinking=False)[2]
    assert told(text) == [["f", call.arguments, True]]


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


@pytest.mark.parametrize("tag", ["invoke", "parameter"])
def test_work_for_a_tag_without_an_end_does_not_grow(monkeypatch, tag):
    looks = []

    def counted(read):
        return lambda *arguments: looks.append(read.__name__) or read(*arguments)

    for read_tag in (read_name, read_parameter):
        monkeypatch.setattr(f"services.front.chat.calls.{read_tag.__name__}", counted(read_tag))
    parser = CompletionParser(thinking=False)
    parser.feed(f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}{tag} name="')
    for _ in range(20_000):
        parser.feed(">")
    assert 100 < len(looks) < 2_000
