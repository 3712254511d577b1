import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.front.chat.encoding import ChatOptions, encode_chat, rendered
from services.front.chat.format import ChatFormat, format_from_constants, load_format, read_constants
from services.front.chat.messages import ChatError
from shared.errors import CheckpointError

CONSTANTS = json.loads((Path(__file__).parents[2] / "golden" / "chat" / "constants.json").read_text(encoding="utf-8"))
PREVIEW, LATER = CONSTANTS["preview"], CONSTANTS["0731"]


def source_of(constants):
    """An encoder file as vendors write them: literals among code that must never run."""
    lines = [
        "import nowhere_to_be_found",
        'raise SystemExit("executed")',
        *[f"{name} = {value!r}" for name, value in constants.items()],
        "def encode(x): return TOOLS_TEMPLATE.format(x)",
    ]
    return "\n".join(lines)


def write(checkpoint, source):
    (checkpoint / "encoding").mkdir()
    path = checkpoint / "encoding" / "encoding_dsv4.py"
    path.write_text(source, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["preview", "0731"])
def test_constants_come_from_the_checkpoint(tmp_path, name):
    write(tmp_path, source_of(CONSTANTS[name]))
    loaded = load_format(tmp_path)
    assert loaded == format_from_constants(CONSTANTS[name])
    assert loaded.name == name


def test_efforts_differ_between_the_two_encoders():
    assert dict(format_from_constants(PREVIEW).efforts) == {
        None: "",
        "high": "",
        "max": PREVIEW["REASONING_EFFORT_MAX"],
    }
    assert dict(format_from_constants(LATER).efforts) == {None: "", **LATER["REASONING_EFFORT_PROMPTS"]}


def test_the_default_effort_is_the_files():
    chat_format = format_from_constants(LATER | {"DEFAULT_REASONING_EFFORT": "high"})
    assert chat_format.efforts[None] == LATER["REASONING_EFFORT_PROMPTS"]["high"]


def test_reads_literals_and_nothing_else():
    source = 'A: str = "a"\nB = ("b" "c")\nC = {"x": A}\nD = len("d")\nE: int\nF, G = 1, 2\nH = I = 3\n'
    assert read_constants(source) == {"A": "a", "B": "bc", "C": {"x": "a"}, "H": 3, "I": 3}


def test_a_checkpoint_without_an_encoder_has_plain_turns(tmp_path):
    chat_format = load_format(tmp_path)
    assert chat_format == ChatFormat()
    prompt = encode_chat([{"role": "user", "content": "Hi"}], chat_format, ChatOptions())
    assert rendered(prompt) == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"tools": [{"function": {"name": "f"}}]}, "tools: this checkpoint has no encoding"),
        ({"response_format": {"type": "json_object"}}, "response_format: this checkpoint has no encoding"),
    ],
)
def test_plain_turns_have_no_templates(extra, complaint):
    with pytest.raises(ChatError, match=complaint):
        encode_chat([{"role": "system", "content": "", **extra}], ChatFormat(), ChatOptions())


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def", "invalid syntax"),
        ("\0", "null bytes"),
        (source_of({"A": 1}), "TOOLS_TEMPLATE is not there"),
        (
            source_of(PREVIEW | {"TOOLS_TEMPLATE": "{tool_schemas.__class__}"}),
            "uses the field 'tool_schemas.__class__'",
        ),
        (source_of(PREVIEW | {"TOOLS_TEMPLATE": "{tool_schemas!r}"}), "uses the field"),
        (source_of(PREVIEW | {"TOOLS_TEMPLATE": "{"}), "Single '{'"),
        (
            source_of(PREVIEW | {"response_format_template": "{other}"}),
            "response_format_template uses the field 'other'",
        ),
        (source_of(PREVIEW | {"REASONING_EFFORT_MAX": None}), "neither"),
        (source_of(LATER | {"REASONING_EFFORT_PROMPTS": ["low"]}), "not a table"),
        (source_of(LATER | {"REASONING_EFFORT_PROMPTS": {"max": ""}}), "no entry for the default 'low'"),
    ],
)
def test_unreadable_encoders_are_named(tmp_path, source, complaint):
    path = write(tmp_path, source)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_format(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (["hi"], r"messages\[0\] must be an object, not text"),
        ([{"role": "robot", "content": ""}], r"messages\[0\]\.role must be one of system, .*not 'robot'"),
        ([{"role": ["user"], "content": ""}], r"messages\[0\]\.role must be one of"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text, not a number"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content must be text, not null"),
        ([{"role": "user", "content": "", "task": ["x"]}], r"messages\[0\]\.task must be one of"),
        ([{"role": "assistant", "reasoning_content": 5}], r"messages\[0\]\.reasoning_content must be text"),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\]\.tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [1]}], r"messages\[0\]\.tool_calls\[0\] must have function\.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "arguments of the call of 'f' must be a JSON object",
        ),
        ([{"role": "tool", "content": 5}], r"messages\[0\]\.content must be a list"),
        ([{"role": "tool", "content": ["x"]}], r"messages\[0\]\.content\[0\] must be an object"),
        ([{"role": "system", "tools": [{}]}], r"messages\[0\]\.tools\[0\] must have function\.name"),
        ([{"role": "system", "tools": "f"}], r"messages\[0\]\.tools must be a list"),
    ],
)
def test_misshapen_messages_are_named(messages, complaint):
    with pytest.raises(ChatError, match=complaint):
        encode_chat(messages, format_from_constants(LATER), ChatOptions())


def test_effort_must_be_the_checkpoints():
    with pytest.raises(ChatError, match="'low' is not one of this checkpoint's: high, max"):
        encode_chat([], format_from_constants(PREVIEW), ChatOptions(effort="low"))


def test_pure_modules_load_without_heavy_packages():
    code = (
        "import sys, services.front.chat.encoding, services.front.chat.parser, services.front.detokenizer\n"
        "print([m for m in ('torch', 'zmq', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
