"""OpenAI's own client on /v1/responses of the running demo: answers, streams, reasoning, calls, ends and errors."""

import json
import time

import httpx2
import openai
import pytest
from helpers.front import demo_front, front_stats, url_of

from demo.tasks import TOOLS

pytestmark = pytest.mark.system

SUM, ANSWER = "What is 37 + 45?", "37 + 45 = 82."
STORY = "Tell me a story about a cat."
WEATHER = "What is the weather in Dublin for 8 days?"
WEATHER_TOOL, LIGHT_TOOL = ({"type": "function", "strict": False, **tool["function"]} for tool in TOOLS[:2])


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with demo_front(tmp_path_factory.mktemp("responses")) as services:
        yield services


@pytest.fixture(scope="module")
def client(stack):
    with openai.OpenAI(base_url=f"{url_of(stack)}/v1", api_key="none", max_retries=0, timeout=60.0) as connected:
        yield connected


def said(response):
    """What the items of a response say, without the ids that differ each time."""
    items = []
    for item in response.output:
        if item.type == "function_call":
            items.append((item.type, item.status, item.name, item.arguments))
        else:
            items.append((item.type, item.status, "".join(part.text for part in item.content)))
    return items


def ask(client, given, **options):
    options = {"model": "demo", "max_output_tokens": 200, "temperature": 0.0, "store": False} | options
    return client.responses.create(input=given, **options)


def ask_streaming(client, given, **options):
    """The response at the end of the stream."""
    last = list(ask(client, given, stream=True, **options))[-1]
    assert last.type == f"response.{last.response.status}"
    return last.response


def test_answers(client):
    response = ask(client, SUM)
    assert (response.output_text, response.status, response.object) == (ANSWER, "completed", "response")
    assert response.id.startswith("resp_")
    assert abs(response.created_at - time.time()) < 3600
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_streams_what_it_would_answer(client):
    options = {"reasoning": {"effort": "low"}, "tools": [WEATHER_TOOL]}
    streamed, whole = ask_streaming(client, WEATHER, **options), ask(client, WEATHER, **options)
    assert said(streamed) == said(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_says_which_tokens_were_kept(client):
    conversation = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": "Once there was a cat."},
        {"role": "user", "content": SUM},
    ]
    for _ in range(2):
        usage = ask(client, conversation, instructions="Be kind.", max_output_tokens=1).usage
    assert 0 < usage.input_tokens_details.cached_tokens <= usage.input_tokens


def test_the_clients_helper_reads_the_stream(client):
    with client.responses.stream(model="demo", input=SUM, temperature=0.0) as stream:
        kinds, pieces = [], []
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
        assert stream.get_final_response().output_text == "".join(pieces) == ANSWER
    assert kinds[0] == "response.created"
    assert len(pieces) > 3
    assert kinds[-1] == "response.completed"


def test_reasons(client):
    response = ask_streaming(client, SUM, reasoning={"effort": "low"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert "82" in response.output[0].content[0].text
    assert response.output_text == ANSWER
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    follow_up = [{"role": "user", "content": SUM}, *response.output, {"role": "user", "content": "Thank you!"}]
    assert ask(client, follow_up, reasoning={"effort": "low"}).output_text


def test_a_tool_round_trip(client):
    options = {"tools": [WEATHER_TOOL, LIGHT_TOOL], "reasoning": {"effort": "low"}}
    question = {"role": "user", "content": WEATHER}
    response = ask_streaming(client, [question], **options)
    call = response.output[-1]
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments) == {"city": "Dublin", "days": 8}
    output = json.dumps({"degrees": 21, "sky": "rain"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    assert ask(client, [question, *response.output, result], **options).output_text == (
        "In Dublin it is 21 degrees with rain."
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "set_light"}])
def test_a_call_can_be_forced(client, choice):
    response = ask(client, "Please switch on the light in the bathroom.", tools=[LIGHT_TOOL], tool_choice=choice)
    assert said(response) == [("function_call", "completed", "set_light", '{"room": "bathroom", "on": true}')]


def test_a_call_can_be_forbidden(client):
    response = ask(client, WEATHER, tools=[WEATHER_TOOL], tool_choice="none")
    assert {item.type for item in response.output} <= {"message"}


def test_ends_after_max_output_tokens(client):
    response = ask_streaming(client, STORY, max_output_tokens=7)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 7


def test_a_client_that_leaves_cancels(client, stack):
    before = front_stats(stack)["requests_cancelled"]
    with client.responses.create(model="demo", input=STORY, stream=True) as stream:
        next(iter(stream))
    until_s = time.monotonic() + 20
    while front_stats(stack)["requests_cancelled"] == before:
        assert time.monotonic() < until_s
    assert ask(client, SUM).output_text == ANSWER


def test_an_answer_can_be_cancelled_from_elsewhere(client):
    with client.responses.create(model="demo", input=STORY, temperature=0.0, stream=True) as stream:
        events = iter(stream)
        response_id = next(events).response.id
        client.delete(f"/responses/{response_id}", cast_to=httpx2.Response)
        last = list(events)[-1]
    assert last.type in ("response.failed", "response.completed")
    with pytest.raises(openai.NotFoundError):
        client.delete(f"/responses/{response_id}", cast_to=httpx2.Response)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens must be 1 to"),
        ({"input": []}, "input must end with"),
        ({"input": "word " * 3000}, "model.max_context"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"tools": [{"type": "web_search"}]}, "only function tools"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_bad_requests_are_explained(client, stream, change, complaint):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "demo", "input": SUM, "stream": stream} | change)
    assert caught.value.type == "invalid_request_error"
    assert complaint in caught.value.body["message"]
