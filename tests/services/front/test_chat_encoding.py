import json
from pathlib import Path

import pytest

from services.front.chat.encoding import ChatOptions, ThinkingMode, encode_chat, rendered
from services.front.chat.format import format_from_constants

GOLDEN = Path(__file__).parents[2] / "golden" / "chat"
CONSTANTS = json.loads((GOLDEN / "constants.json").read_text(encoding="utf-8"))
CASES = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))


def encode(case):
    kwargs = case["kwargs"]
    options = ChatOptions(
        mode=ThinkingMode(kwargs["thinking_mode"]),
        drop_thinking=kwargs.get("drop_thinking", True),
        effort=kwargs.get("reasoning_effort"),
        add_bos=kwargs.get("add_default_bos_token", True),
    )
    chat_format = format_from_constants(CONSTANTS[case["encoder"]])
    return encode_chat(case["messages"], chat_format, options, kwargs.get("context", ()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_encodes_as_the_vendor_does(case):
    if "expected_error" in case:
        with pytest.raises(ValueError, match=r"\w"):
            encode(case)
    else:
        assert rendered(encode(case)) == case["expected"]
