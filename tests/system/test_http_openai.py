"""OpenAI's own client against the running demo: every parameter, both forms of answer, tools, ends, cancels, errors."""

import json
import time

import httpx2
import openai
import pytest
from helpers.fake_worker import until
from helpers.front import demo_front, front_stats, published, url_of

from demo.tasks import TOOLS

pytestmark = pytest.mark.system

SUM = [{"role": "user", "content": "What is 37 + 45?"}]
STORY = [{"role": "user", "content": "Tell me a story about a cat."}]
WEATHER = {"role": "user", "content": "What is the weather in Dublin for 8 days?"}
LIGHT = [{"role": "user", "content": "Please switch on the light in the bathroom."}]
WEATHER_TOOL, LIGHT_TOOL = TOOLS[:2]
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
REFERRING = {"$defs": {"person": PERSON}, "$ref": "#/$defs/person"}  # checked in a process of its own


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with demo_front(tmp_path_factory.mktemp("openai")) as services:
        yield services


@pytest.fixture(scope="module")
def client(stack):
    with openai.OpenAI(base_url=f"{url_of(stack)}/v1", api_key="none", max_retries=0, timeout=60.0) as connected:
        yield connected


def ask(client, messages, **options):
    options = {"model": "demo", "max_tokens": 200, "temperature": 0} | options
    return client.chat.completions.create(messages=messages, **options)


def choice_of(answer):
    (choice,) = answer.choices
    return choice


def streamed(client, messages, **options):
    """All chunks of a streamed answer."""
    with ask(client, messages, stream=True, **options) as chunks:
        return list(chunks)


def joined(chunks, key="content"):
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    return "".join(getattr(delta, key, None) or "" for delta in deltas)


# --- chat completions ------------------------------------------------------------------------------------------------


def test_answers(client):
    answer = ask(client, SUM)
    choice = choice_of(answer)
    assert (choice.message.content, choice.finish_reason) == ("37 + 45 = 82.", "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")


def test_streams_what_it_would_answer(client):
    chunks = streamed(client, SUM)
    assert joined(chunks) == "37 + 45 = 82."
    assert len(chunks) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


def test_usage_and_the_tokens_that_were_kept(client):
    conversation = [*STORY, {"role": "assistant", "content": "Once there was a cat."}, *SUM]
    whole = ask(client, conversation, max_tokens=3)
    options = {"max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, last = streamed(client, conversation, **options)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 3)
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_length_and_both_names_of_the_limit(client):
    for options in ({"max_tokens": 5}, {"max_tokens": 50, "max_completion_tokens": 5}):
        answer = ask(client, STORY, **options)
        assert (choice_of(answer).finish_reason, answer.usage.completion_tokens) == ("length", 5)


def test_stop_texts(client):
    for stop in ("= 8", ["never", "= 8"]):
        answer = ask(client, SUM, stop=stop)
        choice = choice_of(answer)
        assert (choice.message.content, choice.finish_reason) == ("37 + 45 ", "stop")
        assert choice.stop_reason == "= 8"
    assert joined(streamed(client, SUM, stop="= 8")) == "37 + 45 "


def test_a_stop_text_stops_the_worker(client, stack):
    before = front_stats(stack)["generated_tokens"]
    ask(client, STORY, stop="a", max_tokens=900)
    assert front_stats(stack)["generated_tokens"] - before < 40


def test_the_same_seed_says_the_same(client):
    def said(seed):
        return choice_of(ask(client, STORY, temperature=1.0, seed=seed, max_tokens=40)).message.content

    assert said(3) == said(3) != said(4)


@pytest.mark.parametrize(
    "options", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}], ids=str
)
def test_narrow_sampling_is_greedy(client, options):
    greedy = choice_of(ask(client, STORY, max_tokens=30)).message.content
    assert choice_of(ask(client, STORY, max_tokens=30, temperature=1.0, **options)).message.content == greedy


def test_logprobs(client):
    answer = ask(client, SUM, logprobs=True, top_logprobs=3)
    tokens = choice_of(answer).logprobs.content
    assert "".join(token.token for token in tokens) == "37 + 45 = 82."
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)  # greedy: the likeliest
        assert bytes(token.bytes).decode() == token.token
    chunks = streamed(client, SUM, logprobs=True, top_logprobs=3)
    assert [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content] == tokens


@pytest.mark.parametrize(
    "options",
    [
        {"reasoning_effort": "high"},
        {"reasoning_effort": "minimal"},
        {"extra_body": {"thinking": {"type": "enabled"}}},
        {"extra_body": {"chat_template_kwargs": {"thinking": True}}},
    ],
    ids=str,
)
def test_reasoning_comes_apart(client, options):
    answer = ask(client, SUM, **options)
    message = choice_of(answer).message
    assert message.content == "37 + 45 = 82."
    assert "82" in message.reasoning_content
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    chunks = streamed(client, SUM, **options)
    assert (joined(chunks, "reasoning_content"), joined(chunks)) == (message.reasoning_content, message.content)


@pytest.mark.parametrize("options", [{}, {"reasoning_effort": "none"}], ids=str)
def test_no_reasoning_unless_asked_for(client, options):
    assert not hasattr(choice_of(ask(client, SUM, **options)).message, "reasoning_content")


def test_a_tool_round_trip(client):
    options = {"tools": [WEATHER_TOOL, LIGHT_TOOL], "reasoning_effort": "high"}
    choice = choice_of(ask(client, [WEATHER], **options))
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Dublin", "days": 8}
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21, "sky": "rain"})}
    answer = choice_of(ask(client, [WEATHER, choice.message.model_dump(exclude_none=True), result], **options))
    assert (answer.message.content, answer.finish_reason) == ("In Dublin it is 21 degrees with rain.", "stop")


def test_streamed_tool_calls(client):
    with client.chat.completions.stream(
        model="demo", messages=[WEATHER], tools=[WEATHER_TOOL], temperature=0, max_tokens=200
    ) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "".join(pieces) == call.function.arguments
    assert len(pieces) > 2, "it came while it was written"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Dublin", "days": 8})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_light"}}], ids=str)
@pytest.mark.parametrize("effort", ["none", "high"])
def test_a_call_can_be_forced(client, choice, effort):
    answer = choice_of(ask(client, LIGHT, tools=[LIGHT_TOOL], tool_choice=choice, reasoning_effort=effort))
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("set_light", {"room": "bathroom", "on": True})


def test_a_forced_call_that_is_cut_off_says_length(client):
    answer = choice_of(ask(client, LIGHT, tools=[LIGHT_TOOL], tool_choice="required", max_tokens=5))
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)


def test_a_call_can_be_forbidden(client):
    answer = choice_of(ask(client, [WEATHER], tools=[WEATHER_TOOL], tool_choice="none"))
    assert answer.message.tool_calls is None
    assert answer.finish_reason in ("stop", "length")


def test_one_call_at_a_time(client):
    answer = choice_of(ask(client, [WEATHER], tools=[WEATHER_TOOL], parallel_tool_calls=False))
    assert (len(answer.message.tool_calls), answer.finish_reason) == (1, "tool_calls")


@pytest.mark.parametrize(
    ("response_format", "complaint"),
    [
        ({"type": "json_object"}, "not JSON"),
        ({"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}, "not JSON"),
        ({"type": "json_schema", "json_schema": {"name": "p", "schema": REFERRING}}, "not JSON"),
    ],
    ids=str,
)
def test_an_answer_says_whether_it_is_the_json_asked_for(client, response_format, complaint):
    """The demo model has never heard of JSON, so this is the honest report of a failure."""
    report = choice_of(ask(client, SUM, response_format=response_format, max_tokens=20)).response_format
    assert report["valid"] is False
    assert complaint in report["error"]
    last = streamed(client, SUM, response_format=response_format, max_tokens=20)[-1]
    assert last.choices[0].response_format == report


@pytest.mark.parametrize("effort", ["none", "high"])
def test_instructions_of_either_name_are_the_same_prompt(client, effort):
    """With reasoning, too, where the model's own `developer` turns are forgotten."""
    counts = {
        role: ask(client, [{"role": role, "content": "Be kind."}, *SUM], reasoning_effort=effort).usage.prompt_tokens
        for role in ("system", "developer")
    }
    assert counts["developer"] == counts["system"]


def test_continues_what_the_assistant_began(client):
    answer = ask(client, [*SUM, {"role": "assistant", "content": "37 + 45 = ", "prefix": True}])
    assert choice_of(answer).message.content == "82."
    with pytest.raises(openai.BadRequestError, match="messages must end with what the model should answer"):
        ask(client, [*SUM, {"role": "assistant", "content": "37 + 45 = "}])


def test_text_asks_for_no_format(client):
    assert not hasattr(choice_of(ask(client, SUM, response_format={"type": "text"})), "response_format")


def test_what_only_concerns_the_vendor_is_ignored(client):
    answer = ask(client, SUM, user="u", n=1, store=False, metadata={"a": "b"}, service_tier="auto")
    assert choice_of(answer).message.content == "37 + 45 = 82."


# --- text completions, models ----------------------------------------------------------------------------------------


def test_text_completions(client):
    chat = "<｜User｜>What is 37 + 45?<｜Assistant｜></think>"
    options = {"model": "demo", "temperature": 0, "max_tokens": 40}
    answer = client.completions.create(prompt=chat, logprobs=2, **options)
    choice = choice_of(answer)
    assert (choice.text, choice.finish_reason) == ("37 + 45 = 82.", "stop")
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    assert answer.usage.prompt_tokens == ask(client, SUM).usage.prompt_tokens
    chunks = list(client.completions.create(prompt=[chat], stream=True, stop=" =", **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "37 + 45"


def test_text_completions_of_token_ids(client):
    answer = client.completions.create(model="demo", prompt=[[0, 5, 6]], max_tokens=3, temperature=0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)


def test_models(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    assert model.max_model_len == 1024
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


# --- errors and cancels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_name_the_field(client, options, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **({"messages": SUM} | options), stream=stream)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long(client):
    with pytest.raises(openai.BadRequestError, match=r"the prompt has .* tokens, but model\.max_context = 1024"):
        ask(client, [{"role": "user", "content": "cat " * 2000}])


def test_a_client_that_leaves_stops_the_worker(client, stack):
    before = front_stats(stack)
    with ask(client, STORY, stream=True, max_tokens=900, temperature=1.5, seed=1) as chunks:
        next(iter(chunks))
    deadline = time.monotonic() + 20
    while front_stats(stack)["requests_cancelled"] == before["requests_cancelled"]:
        assert time.monotonic() < deadline
    assert front_stats(stack)["requests_running"] == 0
    assert choice_of(ask(client, SUM)).message.content == "37 + 45 = 82."


def test_an_answer_can_be_cancelled_from_elsewhere(client, stack):
    with ask(client, STORY, stream=True, max_tokens=900, temperature=1.5, seed=1) as stream:
        chunks = iter(stream)
        answer_id = next(chunks).id
        gone = httpx2.delete(f"{url_of(stack)}/v1/chat/completions/{answer_id}")
        assert (gone.status_code, gone.json()["cancelled"]) == (200, True)
        assert [*chunks][-1].choices[0].finish_reason == "abort"
    assert httpx2.delete(f"{url_of(stack)}/v1/chat/completions/{answer_id}").status_code == 404


# --- operations ------------------------------------------------------------------------------------------------------


def test_health_statistics_and_metrics(client, stack):
    ask(client, SUM)
    url = url_of(stack)
    health = httpx2.get(f"{url}/health")
    assert (health.status_code, health.json()["ready"]) == (200, True)
    stats = httpx2.get(f"{url}/stats").json()
    assert {service["name"] for service in stats["services"]} == {"expertd", "worker", "front"}
    assert stats["front"]["done"] > 0
    assert stats["cache"]["uses"] > 0
    metrics = httpx2.get(f"{url}/metrics").text
    assert 'icebox_http_responses_total{endpoint="chat",status="200"}' in metrics
    assert "icebox_expertd_misses_by_index{" in metrics
    assert "icebox_front_requests_done " in metrics


def test_health_says_who_is_missing_and_the_rest_is_served(tmp_path):
    with demo_front(tmp_path) as stack, httpx2.Client(base_url=url_of(stack), timeout=20.0) as client:
        until(lambda: client.get("/health").status_code == 200, "all are ready")
        stack.kill("worker")
        until(lambda: client.get("/health").status_code == 503, "the loss is seen")
        health = client.get("/health").json()
        assert "worker is not running" in health["detail"]
        assert {name: s["state"] == "ready" for name, s in health["services"].items()} | {"front": False} == {
            "expertd": True,
            "worker": False,
            "front": False,
        }
        assert [client.get(path).status_code for path in ("/metrics", "/stats", "/", "/v1/models")] == [200] * 4
        stack.start("worker")
        until(lambda: client.get("/health").status_code == 200, "the worker is back")


def test_a_client_that_leaves_stops_the_reading_of_its_prompt(stack):
    """Fourteen chunks of 64 tokens; the worker is free after the one that it has begun."""
    body = {"messages": [{"role": "user", "content": "7 " * 430}], "max_tokens": 1, "stream": True}
    before = published(stack, "worker")["prompt_tokens"]
    with httpx2.stream("POST", f"{url_of(stack)}/v1/chat/completions", json=body, timeout=60.0):
        until(lambda: published(stack, "worker")["prompt_tokens"] > before, "the prompt is being read")
    until(lambda: published(stack, "worker")["requests_running"] == 0, "the worker is free")
    read = published(stack, "worker")["prompt_tokens"] - before
    whole = httpx2.post(f"{url_of(stack)}/v1/chat/completions", json=body | {"stream": False}, timeout=60.0).json()
    assert 0 < read < whole["usage"]["prompt_tokens"]
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == read, "what was read is kept"
