import pytest

from services.front.generation import SHORT, Conversation, GenerationRequest, RawPrompt, is_short


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (RawPrompt("a" * SHORT), True),
        (RawPrompt("a" * (SHORT + 1)), False),
        (RawPrompt((1,) * (SHORT + 1)), False),
        (Conversation(({"role": "user", "content": "Hello"},)), True),
        (Conversation(({"role": "user", "content": "a" * SHORT},)), False),
        (Conversation(({"role": "user", "content": [{"text": "a" * 400}] * 6},)), False),
        (Conversation(({"role": "user", "content": "Hello"},), tools=({"a": "b" * SHORT},)), False),
        (Conversation(({"role": "user", "content": "Hello"},), json_schema={"a": [1] * SHORT}), False),
        (Conversation(deep(900)), True),
        (Conversation(deep(100_000)), False),
    ],
)
def test_short_prompts(prompt, expected):
    assert is_short(GenerationRequest(prompt)) is expected
