"""From tokens to events, one request at a time."""

import dataclasses
import json

import pytest
from helpers.fake_worker import VOCAB_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st

from services.front.answer import Answer
from services.front.chat.format import ChatFormat
from services.front.generation import (
    Conversation,
    Finished,
    GenerationRequest,
    RawPrompt,
    ReasoningDelta,
    Sampling,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
)
from services.front.prompt import PromptMaker
from services.front.tokenizer import Tokenizer
from shared.checkpoint.synth_tokenizer import tokenizer_files
from shared.protocol.messages import TokensGenerated

CALLS = "\n\n<｜DSML｜tool_calls>\n"
ZONE = '<｜DSML｜parameter name="zone" string="true">UTC</｜DSML｜parameter>'
CALL = f'<｜DSML｜invoke name="now">\n{ZONE}\n</｜DSML｜invoke>\n'
END = "</｜DSML｜tool_calls>"
HELLO = {"role": "user", "content": "Hello"}
TOOLS_TEMPLATE = "Tools: {tool_schemas}"
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(json.dumps(tokenizer_files(VOCAB_SIZE)["tokenizer.json"]))


@pytest.fixture(scope="module")
def maker(tokenizer):
    return PromptMaker(tokenizer, ChatFormat("test", TOOLS_TEMPLATE, "Schema: {schema}"), 4096, 100)


def request(stop=(), sampling=None, raw=None, **chat):
    prompt = RawPrompt(raw) if raw is not None else Conversation((HELLO,), **chat)
    return GenerationRequest(prompt, sampling or Sampling(), tuple(stop))


def run(maker, tokenizer, asked, text, reason="stop", group=1):
    """All events of an answer whose tokens say `text`, `group` tokens a message; and the answer."""
    answer = Answer(maker.make(asked), tokenizer)
    ids = tokenizer.encode([(text, True)])
    events = []
    for i in range(0, len(ids), group):
        if answer.is_complete:
            break
        part, count = tuple(ids[i : i + group]), min(i + group, len(ids))
        logprobs = tuple(-float(n) for n in range(i, i + len(part))) if asked.sampling.top_logprobs >= 0 else ()
        top = {"logprobs": logprobs}
        if asked.sampling.top_logprobs == 1:
            top |= {"top_ids": part, "top_logprobs": logprobs}
        events += answer.add(TokensGenerated(part, "", answer.usage.prompt_tokens, count, 2, 0.1, 0.2, **top), 0.5)
    if not answer.is_complete:
        events += answer.add(TokensGenerated((), reason, answer.usage.prompt_tokens, len(ids), 2, 0.1, 0.2), 0.6)
    events += answer.end(0.7)
    return events, answer


def said(events):
    """(reasoning, text, [(name, arguments)], the last event)."""
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(e, Started | Finished) for e in events) == 2
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    calls = {}
    for e in events:
        if isinstance(e, ToolCallDelta):
            name, arguments = calls.get(e.index, ("", ""))
            calls[e.index] = (name + e.name, arguments + e.arguments)
    return reasoning, text, list(calls.values()), events[-1]


def test_text_and_counts(maker, tokenizer):
    events, answer = run(maker, tokenizer, request(), "Noon — at last.")
    reasoning, text, calls, last = said(events)
    assert (reasoning, text, calls, last.reason, last.stop_text) == ("", "Noon — at last.", [], "stop", None)
    assert events[0] == Started(answer.usage.prompt_tokens, 2)
    assert last.usage == answer.usage
    assert (last.usage.cached_tokens, last.usage.reasoning_tokens) == (2, 0)
    assert last.usage.completion_tokens == len(tokenizer.encode([("Noon — at last.", True)]))
    assert (last.usage.ttft_s, last.usage.elapsed_s) == (0.5, 0.7)


def test_reasoning_is_counted_apart(maker, tokenizer):
    events, _ = run(maker, tokenizer, request(thinking=True), "Hm.</think>Yes.")
    reasoning, text, _, last = said(events)
    assert (reasoning, text) == ("Hm.", "Yes.")
    assert last.usage.reasoning_tokens == len(tokenizer.encode([("Hm.</think>", True)]))


def test_calls_have_ids_of_their_own(maker, tokenizer):
    events, _ = run(maker, tokenizer, request(), f"Look:{CALLS}{CALL}{CALL}{END}")
    _, text, calls, last = said(events)
    assert (text, calls, last.reason) == ("Look:", [("now", '{"zone": "UTC"}')] * 2, "tool_calls")
    ids = [e.id for e in events if isinstance(e, ToolCallDelta) and e.name]
    assert len(set(ids)) == len(ids) == 2
    assert all(i.startswith("call_") for i in ids)


def test_a_call_is_told_in_pieces(maker, tokenizer):
    events, _ = run(maker, tokenizer, request(), f"{CALLS}{CALL}{CALL}{END}")
    called = [e for e in events if isinstance(e, ToolCallDelta | ToolCallDone)]
    assert [(e.index, e.arguments) for e in called if isinstance(e, ToolCallDone)] == [
        (i, '{"zone": "UTC"}') for i in (0, 1)
    ]
    for i in (0, 1):
        begun, *pieces, done = [e for e in called if e.index == i]
        assert (begun.name, begun.arguments) == ("now", "")
        assert all(e.arguments and not (e.id or e.name) for e in pieces)
        assert len(pieces) > 2
        assert isinstance(done, ToolCallDone)
    assert [e.index for e in called] == sorted(e.index for e in called)


def test_a_call_that_is_cut_off_is_never_done(maker, tokenizer):
    text = f"{CALLS}{CALL}{CALL.split('C<')[0]}"
    events, _ = run(maker, tokenizer, request(), text, reason="length")
    assert said(events)[2:] == ([("now", '{"zone": "UTC"}'), ("now", '{"zone": "UT')], events[-1])
    assert [e.index for e in events if isinstance(e, ToolCallDone)] == [0]
    assert events[-1].reason == "length"


def test_one_call_at_most(maker, tokenizer):
    events, answer = run(maker, tokenizer, request(max_calls=1), f"{CALLS}{CALL}{CALL}{END}")
    _, _, calls, last = said(events)
    assert (len(calls), last.reason) == (1, "tool_calls")
    assert answer.is_complete
    assert last.usage.completion_tokens < len(tokenizer.encode([(f"{CALLS}{CALL}{CALL}", True)]))


def test_calls_that_nobody_wanted_are_dropped(maker, tokenizer):
    events, _ = run(maker, tokenizer, request(max_calls=0), f"Look:{CALLS}{CALL}{END}")
    assert said(events)[1:3] == ("Look:", [])
    assert events[-1].reason == "stop"


@pytest.mark.parametrize("forced", ["", "now"])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_forced_call_is_begun_in_the_prompt(maker, tokenizer, forced, thinking):
    """The model goes on where the prompt ends, and the call comes out whole."""
    asked = request(forced_call=forced, tools=(NOW,), thinking=thinking)
    prompt = maker.make(asked)
    text = b"".join(map(tokenizer.token_bytes, prompt.generate.prompt_ids)).decode()
    opening = f"</think>{CALLS}" + '<｜DSML｜invoke name="' + ('now">\n' if forced else "")
    assert text.endswith(opening)
    assert not prompt.thinking
    rest = ("" if forced else 'now">\n') + CALL.split("\n", 1)[1] + END
    events, answer = run(maker, tokenizer, asked, rest)
    assert said(events)[:3] == ("", "", [("now", '{"zone": "UTC"}')])
    if forced:
        assert events[1].name == "now", "its name was known before the first token"
    assert events[-1].reason == "tool_calls"
    assert answer.is_well_formed


def test_a_stop_text_ends_the_answer_at_once(maker, tokenizer):
    events, answer = run(maker, tokenizer, request(stop=["lighthouse", " keeper"]), "Ask the keeper of the lighthouse")
    _, text, _, last = said(events)
    assert (text, last.reason, last.stop_text) == ("Ask the", "stop", " keeper")
    assert answer.is_complete
    assert last.usage.completion_tokens <= len(tokenizer.encode([("Ask the keeper", True)]))


def test_stop_texts_count_in_text_only(maker, tokenizer):
    asked = request(stop=["Hm", "UTC"], thinking=True)
    events, _ = run(maker, tokenizer, asked, f"Hm.</think>Yes.{CALLS}{CALL}{END}")
    reasoning, text, calls, last = said(events)
    assert (reasoning, text, len(calls), last.reason) == ("Hm.", "Yes.", 1, "tool_calls")


def test_text_held_for_a_stop_text_comes_before_the_calls(maker, tokenizer):
    events, _ = run(maker, tokenizer, request(stop=["Look:!"]), f"Look:{CALLS}{CALL}{END}")
    kinds = [type(e) for e in events if isinstance(e, TextDelta | ToolCallDelta)]
    assert kinds[-1] is ToolCallDelta
    assert said(events)[1] == "Look:"


def test_logprobs_belong_to_the_tokens_of_the_text(maker, tokenizer):
    asked = request(thinking=True, sampling=Sampling(top_logprobs=1))
    text = "Hm.</think>Noon — at last."
    events, _ = run(maker, tokenizer, asked, text)
    tokens = [token for e in events if isinstance(e, TextDelta) for token in e.logprobs]
    assert b"".join(token.data for token in tokens).decode() == "Noon — at last."
    first = len(tokenizer.encode([("Hm.</think>", True)]))
    assert [token.logprob for token in tokens] == [-float(first + i) for i in range(len(tokens))]
    assert all(token.top == ((token.data, token.logprob),) for token in tokens)


def test_logprobs_of_a_stop_text_are_dropped(maker, tokenizer):
    asked = request(stop=["keeper"], sampling=Sampling(top_logprobs=0))
    events, _ = run(maker, tokenizer, asked, "Ask the keeper now")
    tokens = [token for e in events if isinstance(e, TextDelta) for token in e.logprobs]
    data = b"".join(token.data for token in tokens)
    assert data.startswith(b"Ask the ")
    assert len(data) - len(tokens[-1].data) < len("Ask the "), "the last one begins before the stop text"


def test_a_raw_completion_is_text_whatever_it_says(maker, tokenizer):
    text = f"<think>Hm.</think>{CALLS}{CALL}"
    events, answer = run(maker, tokenizer, request(raw="Hello"), text)
    assert said(events)[:3] == ("", text, [])
    assert answer.is_well_formed


def test_the_end_of_a_cancelled_answer_says_so(maker, tokenizer):
    answer = Answer(maker.make(request(thinking=True)), tokenizer)
    answer.add(TokensGenerated(tuple(tokenizer.encode([("Hm", True)])), "", 3, 1, 0, 0.1, 0.1), 0.1)
    assert [e.reason for e in answer.end(0.2, "abort") if isinstance(e, Finished)] == ["abort"]


def test_an_answer_may_be_cancelled_between_its_end_and_the_check_of_its_text(maker, tokenizer):
    _, answer = run(maker, tokenizer, request(), "Hm")
    (last,) = answer.end(0.8, "abort")
    assert (last.reason, answer.text) == ("stop", "Hm")


PIECES = st.lists(st.sampled_from(["Hm", ".", "</think>", " keeper", "Look", CALLS, CALL, END, "—", "\n"]), max_size=8)


@settings(deadline=None, max_examples=60)
@given(pieces=PIECES, group=st.integers(1, 7), thinking=st.booleans())
def test_tokens_that_come_together_say_the_same(maker, tokenizer, pieces, group, thinking):
    """However many tokens a message of the worker holds."""
    asked = request(thinking=thinking, stop=["keeper", "Hm.Look"], sampling=Sampling(top_logprobs=0))
    alone, together = (run(maker, tokenizer, asked, "".join(pieces), group=n)[0] for n in (1, group))
    assert said(alone)[:3] == said(together)[:3]
    ends = [dataclasses.replace(e[-1], usage=None) for e in (alone, together)]
    assert ends[0] == ends[1]


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "Hm", "é", "😀", "</think>", " keeper", "<｜DSML｜x> a", CALLS, CALL, END]),
        max_size=8,
    ),
    stop=st.lists(st.sampled_from(["é", "keeper", "m😀", "> "])),
    thinking=st.booleans(),
)
def test_logprobs_are_of_the_tokens_that_the_text_is_made_of(maker, tokenizer, pieces, stop, thinking):
    """Only the first and the last may hold more than text, and text they all hold."""
    asked = request(thinking=thinking, stop=stop, sampling=Sampling(top_logprobs=0))
    events, _ = run(maker, tokenizer, asked, "".join(pieces))
    text = said(events)[1].encode()
    tokens = [token.data for e in events if isinstance(e, TextDelta) for token in e.logprobs]
    data = b"".join(tokens)
    if not text:
        assert not tokens
        return
    before = data.find(text, 0, len(tokens[0]) - 1 + len(text))
    assert before >= 0, "a token is missing, or the first one is not of the text"
    assert len(data) - before - len(text) < len(tokens[-1])
