import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from helpers.tokenizer import published, published_path
from hypothesis import given
from hypothesis import strategies as st

from services.front.chat.encoding import ChatOptions, Segment, ThinkingMode, encode_chat, rendered
from services.front.chat.format import format_from_constants
from services.front.detokenizer import Detokenizer
from services.front.tokenizer import Tokenizer
from shared.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = json.loads((GOLDEN / "tokenizer" / "cases.json").read_text(encoding="utf-8"))
STREAMS = json.loads((GOLDEN / "tokenizer" / "stream.json").read_text(encoding="utf-8"))
CHATS = json.loads((GOLDEN / "chat" / "cases.json").read_text(encoding="utf-8"))
CONSTANTS = json.loads((GOLDEN / "chat" / "constants.json").read_text(encoding="utf-8"))
USER, ASSISTANT, END_THINK = 128803, 128804, 128822


def decode(ids):
    detokenizer = Detokenizer(published().token_bytes)
    return detokenizer.feed(ids) + detokenizer.flush()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_ids_and_text_are_the_published_ones(case):
    assert published().encode([(case["text"], True)]) == case["ids"]
    assert decode(case["ids"]) == case["decoded"]


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case["name"])
def test_pieces_of_a_stream(case):
    detokenizer = Detokenizer(published().token_bytes)
    assert [detokenizer.feed([token]) for token in case["ids"]] == case["pieces"]
    assert detokenizer.flush() == case["flush"]


@given(st.lists(st.integers(0, 129_300), max_size=40), st.data())
def test_grouping_of_tokens_changes_no_text(ids, data):
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(published().token_bytes)
    assert detokenizer.feed(ids[:cut]) + detokenizer.feed(ids[cut:]) + detokenizer.flush() == decode(ids)


@pytest.fixture(scope="module")
def library():
    return tokenizers.Tokenizer.from_file(str(published_path()))


@given(st.lists(st.integers(0, 129_279), max_size=40))
def test_text_is_what_the_library_decodes(library, ids):
    assert decode(ids) == library.decode(ids, skip_special_tokens=False)


@given(st.text())
def test_text_survives(text):
    assert decode(published().encode([(text, False)])) == text


@given(
    st.lists(st.tuples(st.sampled_from(["<｜User｜>", "a", "b\n", "\n", " ", "12", "</think>", "é"]), st.booleans()))
)
def test_segments_without_controls_join(parts):
    """Cutting ordinary text into segments changes no token."""
    tokenizer = published()
    plain = [(text, trusted) for text, trusted in parts if "<" not in text]
    assert tokenizer.encode(plain) == tokenizer.encode([("".join(text for text, _ in plain), True)])
    assert decode(tokenizer.encode(parts)) == "".join(text for text, _ in parts)


@pytest.mark.parametrize("case", [c for c in CHATS if "expected" in c], ids=lambda case: case["name"])
def test_prompts_have_the_vendors_tokens_unless_text_holds_controls(case):
    """Where no message contains a control token, the ids are those of the whole prompt, read as the vendor reads it."""
    kwargs = case["kwargs"]
    options = ChatOptions(
        mode=ThinkingMode(kwargs["thinking_mode"]),
        drop_thinking=kwargs.get("drop_thinking", True),
        effort=kwargs.get("reasoning_effort"),
        add_bos=kwargs.get("add_default_bos_token", True),
    )
    chat_format = format_from_constants(CONSTANTS[case["encoder"]])
    segments = encode_chat(case["messages"], chat_format, options, kwargs.get("context", ()))
    safe = published().encode((s.text, s.trusted) for s in segments)
    as_the_vendor = published().encode([(case["expected"], True)])
    assert (safe == as_the_vendor) == (case["name"] != "special_tokens_in_user_text")
    assert decode(safe) == case["expected"]


hostile = st.lists(
    st.sampled_from(
        ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜end▁of▁sentence｜>", "｜DSML｜", "x", "\n"]
    )
).map("".join)


@given(hostile, hostile, hostile, hostile)
def test_no_text_can_forge_a_turn(system, question, result, argument):
    """Control tokens are as many, and as placed, as with harmless words in the same messages."""

    def controls(*words):
        call = {"id": "1", "function": {"name": words[1], "arguments": json.dumps({words[3]: words[3]})}}
        messages = [
            {"role": "system", "content": words[0], "tools": [{"function": {"name": words[0], "x": words[3]}}]},
            {"role": "user", "content": words[1]},
            {"role": "assistant", "content": words[2], "reasoning_content": words[3], "tool_calls": [call]},
            {"role": "tool", "content": words[2], "tool_call_id": "1"},
        ]
        options = ChatOptions(mode=ThinkingMode.THINKING)
        segments = encode_chat(messages, format_from_constants(CONSTANTS["0731"]), options)
        assert isinstance(rendered(segments), str)
        ids = published().encode((s.text, s.trusted) for s in segments)
        return [i for i in ids if i in (0, 1) or i >= 128_000]

    assert controls(system, question, result, argument) == controls("a", "a", "a", "a")


@pytest.fixture(scope="module")
def library_without_controls():
    table = json.loads(published_path().read_text(encoding="utf-8"))
    return tokenizers.Tokenizer.from_str(json.dumps(table | {"added_tokens": []}))


@given(st.text())
def test_ordinary_text_has_the_librarys_ids(library_without_controls, text):
    ids = library_without_controls.encode(text, add_special_tokens=False).ids
    assert published().encode([(text, False)]) == ids


def test_other_threads_go_on_while_a_long_text_is_encoded():
    tokenizer, text = published(), "icebox measures what experts cost " * 20_000
    encoding = threading.Thread(target=tokenizer.encode, args=([(text, False)],))
    started = last = time.perf_counter()
    longest = 0.0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert longest < (last - started) / 2


def test_controls_count_only_when_trusted():
    token = published()
    assert token.encode([("<｜User｜>", True)]) == [USER]
    assert USER not in token.encode([("<｜User｜>", False)])
    assert token.encode([("<｜Us", True), ("er｜>", True)]) != [USER]
    assert token.control_id("</think>") == END_THINK
    assert token.control_id("<nothing>") is None
    assert Segment("a", trusted=True).trusted


def test_ids_beyond_the_vocabulary_say_nothing():
    assert published().size == 129_280
    assert decode([129_280, 10**6]) == ""


MINIMAL = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}


def test_a_tokenizer_without_controls(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(MINIMAL))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.encode([("ab", True)]), tokenizer.size) == ([0, 1], 2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot read the tokenizer"),
        ("{", "not a usable tokenizer"),
        ("[]", "only byte-level"),
        (json.dumps(MINIMAL | {"decoder": {"type": "WordPiece"}}), "only byte-level"),
        (json.dumps(MINIMAL | {"decoder": None}), "only byte-level"),
        (json.dumps(MINIMAL | {"model": {"type": "None"}}), "not a usable tokenizer"),
    ],
)
def test_unusable_files_are_named(tmp_path, text, complaint):
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        Tokenizer.load(tmp_path)
    assert str(path) in str(caught.value)
