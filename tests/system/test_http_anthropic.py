"""Anthropic's own client against the running demo: answers, streams, thinking, tools, ends, cancels and errors."""

import json
import time

import anthropic
import httpx2
import pytest
from helpers.front import demo_front, front_stats, url_of

from demo.tasks import TOOLS

pytestmark = pytest.mark.system

GREEDY = {"temperature": 0.0}  # the client has no argument for it any more, but the API has
SUM = [{"role": "user", "content": "What is 37 + 45?"}]
STORY = [{"role": "user", "content": "Tell me a story about a cat."}]
WEATHER = {"role": "user", "content": "What is the weather in Dublin for 8 days?"}
FUNCTIONS = [tool["function"] for tool in TOOLS]
WEATHER_TOOL, LIGHT_TOOL = (
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in FUNCTIONS[:2]
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with demo_front(tmp_path_factory.mktemp("anthropic")) as services:
        yield services


@pytest.fixture(scope="module")
def client(stack):
    with anthropic.Anthropic(base_url=url_of(stack), api_key="none", max_retries=0, timeout=60.0) as connected:
        yield connected


def ask(client, messages, **options):
    options = {"model": "demo", "max_tokens": 200, "extra_body": GREEDY} | options
    return client.messages.create(messages=messages, **options)


def ask_streaming(client, messages, **options):
    """The message that the client puts together out of the stream."""
    options = {"model": "demo", "max_tokens": 200, "extra_body": GREEDY} | options
    with client.messages.stream(messages=messages, **options) as stream:
        return stream.get_final_message()


def said(message):
    """What the blocks of a message say, without the ids that differ each time."""
    return [block.to_dict() | ({"id": ""} if block.type == "tool_use" else {}) for block in message.content]


def count(client, messages, **options):
    return client.messages.count_tokens(model="demo", messages=messages, **options).input_tokens


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def test_answers(client):
    message = ask(client, SUM)
    assert text_of(message) == "37 + 45 = 82."
    assert (message.stop_reason, message.role, message.type) == ("end_turn", "assistant", "message")
    assert message.id.startswith("msg_")
    assert 0 < message.usage.output_tokens < 40


def test_models(client):
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model
    assert (model.type, model.lifecycle, model.max_input_tokens) == ("model", "active", 1024)
    assert ask(client, SUM, max_tokens=1).model == model.id


def test_streams_what_it_would_answer(client):
    options = {"thinking": {"type": "adaptive"}, "tools": [WEATHER_TOOL]}
    streamed, whole = ask_streaming(client, [WEATHER], **options), ask(client, [WEATHER], **options)
    assert said(streamed) == said(whole)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_counts_tokens_and_says_which_were_kept(client):
    conversation = [*STORY, {"role": "assistant", "content": "Once there was a cat."}, *SUM]
    counted = count(client, conversation, system="Be kind.")
    for _ in range(2):
        usage = ask(client, conversation, system="Be kind.", max_tokens=1).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.cache_read_input_tokens > 0


def test_counts_the_tokens_of_what_does_not_fit(client):
    counts = [count(client, [{"role": "user", "content": "word " * n}]) for n in (1000, 3000, 5000)]
    assert 0 < counts[1] - counts[0] == counts[2] - counts[1]


def test_streams_events_in_order(client):
    events = list(client.messages.create(model="demo", max_tokens=50, extra_body=GREEDY, messages=SUM, stream=True))
    kinds = [event.type for event in events]
    num_deltas = kinds.count("content_block_delta")
    expected = ["message_start", "content_block_start", *["content_block_delta"] * num_deltas]
    assert kinds == [*expected, "content_block_stop", "message_delta", "message_stop"]
    assert num_deltas > 3
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == "37 + 45 = 82."


def test_thinks(client):
    message = ask_streaming(client, SUM, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]
    thought, said = message.content
    assert "82" in thought.thinking
    assert said.text == "37 + 45 = 82."
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    follow_up = [*SUM, {"role": "assistant", "content": message.content}, {"role": "user", "content": "Thank you!"}]
    assert text_of(ask(client, follow_up, thinking={"type": "adaptive"}))


def test_a_tool_round_trip(client):
    options = {"tools": [WEATHER_TOOL, LIGHT_TOOL], "thinking": {"type": "adaptive"}}
    message = ask_streaming(client, [WEATHER], **options)
    call = message.content[-1]
    assert (message.stop_reason, call.type) == ("tool_use", "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": "Dublin", "days": 8})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps({"degrees": 21, "sky": "rain"})}
    conversation = [WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = ask(client, conversation, **options)
    assert answer.stop_reason == "end_turn"
    assert text_of(answer) == "In Dublin it is 21 degrees with rain."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_light"}])
def test_a_call_can_be_forced(client, choice):
    hello = [{"role": "user", "content": "Please switch on the light in the bathroom."}]
    message = ask(client, hello, tools=[LIGHT_TOOL], tool_choice=choice)
    assert message.stop_reason == "tool_use"
    assert (message.content[-1].name, message.content[-1].input) == ("set_light", {"room": "bathroom", "on": True})


def test_a_call_can_be_forbidden(client):
    message = ask(client, [WEATHER], tools=[WEATHER_TOOL], tool_choice={"type": "none"})
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert all(block.type == "text" for block in message.content)


def test_ends_after_max_tokens(client):
    message = ask(client, STORY, max_tokens=7)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 7)


def test_ends_at_a_stop_sequence(client):
    message = ask_streaming(client, SUM, stop_sequences=["never", "= 8"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "= 8")
    assert text_of(message) == "37 + 45 "


def test_continues_what_the_assistant_began(client):
    message = ask(client, [*SUM, {"role": "assistant", "content": "37 + 45 = "}])
    assert text_of(message) == "82."


def test_a_client_that_leaves_cancels(client, stack):
    before = front_stats(stack)["requests_cancelled"]
    with client.messages.stream(model="demo", max_tokens=900, messages=STORY * 3) as stream:
        next(iter(stream))
    until_s = time.monotonic() + 20
    while front_stats(stack)["requests_cancelled"] == before:
        assert time.monotonic() < until_s
    assert text_of(ask(client, SUM)) == "37 + 45 = 82."


def test_an_answer_can_be_cancelled_from_elsewhere(client):
    with client.messages.stream(model="demo", max_tokens=900, extra_body=GREEDY, messages=STORY) as stream:
        events = iter(stream)
        message_id = next(events).message.id
        reply = client.delete(f"/v1/messages/{message_id}", cast_to=httpx2.Response)
        assert reply.status_code == 200
        for _ in events:
            pass
        message = stream.get_final_message()
    assert message.stop_reason in ("pause_turn", "end_turn")
    with pytest.raises(anthropic.NotFoundError):
        client.delete(f"/v1/messages/{message_id}", cast_to=httpx2.Response)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 to"),
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a block of type 'image'"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "model.max_context"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_bad_requests_are_explained(client, stream, change, complaint):
    request = {"model": "demo", "max_tokens": 10, "messages": SUM, "stream": stream} | change
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**request)
    error = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert complaint in error["error"]["message"]


def test_other_errors_have_the_same_form(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.post("/v1/messages/nowhere/else", cast_to=httpx2.Response, body={})
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.get("/v1/messages", cast_to=httpx2.Response)
    assert caught.value.status_code == 405
    with pytest.raises(anthropic.BadRequestError, match="not JSON"):
        client.post("/v1/messages", cast_to=httpx2.Response, content=b"{")
