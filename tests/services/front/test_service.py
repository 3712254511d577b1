"""The front as a process, with a worker of the test's own."""

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from helpers.fake_worker import doomed_worker, fake_worker, make_checkpoint, saying, until
from helpers.services import Stack, running, write_config

from services.front.chat.format import ChatFormat
from services.front.chat_message import request_of
from services.front.prompt import PromptMaker
from services.front.tokenizer import Tokenizer
from shared.config import load_config
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import Chat, ErrorReply, Generate, TextChunk
from shared.runtime.boot import make_identity
from shared.stats import StatsSubscriber
from shared.transport.client import BlockingClient
from shared.transport.control import ping

ANSWER = "The tide turns at noon — ask the keeper."
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def config_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("front")
    front, worker = {"max_queue": 3}, {"max_queue": 2}
    return write_config(folder / "c.toml", make_checkpoint(folder / "model"), front=front, worker=worker)


@pytest.fixture(scope="module")
def config(config_path):
    return load_config(config_path)


@pytest.fixture(scope="module")
def tokenizer(config):
    return Tokenizer.load(config.model.path)


@pytest.fixture(scope="module")
def front(config_path):
    """One front for all tests: it must survive every one of them."""
    stack = Stack(config_path)
    try:
        stack.start("front")
        yield stack
        assert stack.processes["front"].poll() is None, stack.log("front")
        assert stack.terminate("front") == 0, stack.log("front")
        assert "Traceback" not in stack.log("front"), stack.log("front")
    finally:
        for process in stack.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def only_worker(front, config, tokenizer):
    with fake_worker(config, saying(ANSWER, tokenizer)) as fake:
        front.wait_ready("front")
        yield fake


@pytest.fixture
def worker(only_worker, tokenizer):
    only_worker.script, only_worker.num_cancelled = saying(ANSWER, tokenizer), 0
    only_worker.begun.clear()
    return only_worker


@contextmanager
def connected(config):
    client = BlockingClient(config.endpoint("front"), make_identity("test"))
    try:
        client.connect(10.0)
        yield client
    finally:
        client.close()


@pytest.fixture
def client(config, worker):
    with connected(config) as connection:
        yield connection


def chat(messages=HELLO, max_tokens=400, **options):
    return Chat(json.dumps(messages), max_tokens, temperature=0.0, options_json=json.dumps(options))


def collect(client, request_id):
    """All chunks of one request, whatever else is going on on this connection."""
    chunks = []
    until_s = time.monotonic() + 20
    while not chunks or not chunks[-1].finish_reason:
        assert time.monotonic() < until_s, chunks
        event = client.poll(1.0)
        if event is not None and event[0] == request_id:
            if isinstance(event[1], ErrorReply):
                raise ServiceError(ErrorCode(event[1].code), event[1].detail)
            chunks.append(event[1])
    return chunks


def ask(client, message):
    return collect(client, client.start(message))


def text_of(chunks):
    return "".join(chunk.text for chunk in chunks)


class Gate:
    """A script that gives one token, then waits to be opened."""

    def __init__(self, tokenizer):
        self.token = tokenizer.encode([("a", False)])[0]
        self.open = threading.Event()

    def __call__(self, _generate):
        yield self.token
        while not self.open.wait(0.005):
            yield self.token


def paced(script):
    """The same tokens, so slowly that each can be sent before the next comes."""

    def tokens(generate):
        for token in script(generate):
            time.sleep(0.005)
            yield token

    return tokens


def test_streams_an_answer(client, worker, tokenizer):
    worker.script = paced(saying(ANSWER, tokenizer))
    chunks = ask(client, chat())
    assert text_of(chunks) == ANSWER
    assert len(chunks) > 5
    last = chunks[-1]
    assert (last.finish_reason, last.tool_calls_json) == ("stop", "")
    prompt = worker.begun[-1].prompt_ids
    expected = "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>"
    assert list(prompt) == tokenizer.encode([(expected, True)])
    assert (last.prompt_tokens, last.completion_tokens) == (len(prompt), len(tokenizer.encode([(ANSWER, True)])))
    assert 0 < last.ttft_s <= last.elapsed_s


def test_passes_the_sampling_on(client, worker, tokenizer):
    ask(client, Chat(json.dumps(HELLO), 7, 0.5, 0.9, 5, 0.1, 42))
    sent = worker.begun[-1]
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.top_k, sent.min_p, sent.seed) == (
        7,
        0.5,
        0.9,
        5,
        0.1,
        42,
    )
    assert sent.stop_ids == (1,)


def test_length_ends_an_answer(client):
    chunks = ask(client, chat(max_tokens=3))
    assert (chunks[-1].finish_reason, chunks[-1].completion_tokens) == ("length", 3)


@pytest.mark.parametrize(("asked", "expected"), [(0, 1024), (10**6, None), (5, 5)])
def test_max_tokens_is_the_default_or_what_fits(config, tokenizer, asked, expected):
    maker = PromptMaker(tokenizer, ChatFormat(), 2048, config.front.default_max_tokens)
    prompt = maker.make(request_of(chat(max_tokens=asked)))
    room = 2048 - len(prompt.generate.prompt_ids)
    assert prompt.generate.max_tokens == (room if expected is None else expected)


def test_reasoning_and_tool_calls_come_apart(client, worker, tokenizer):
    call = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    worker.script = saying(f"Hm.</think>Look:\n\n{call} and more", tokenizer)
    chunks = ask(client, chat(thinking=True))
    assert ("".join(c.reasoning for c in chunks), text_of(chunks)) == ("Hm.", "Look:")
    (made,) = json.loads(chunks[-1].tool_calls_json)
    assert (made["type"], made["function"]) == ("function", {"name": "now", "arguments": "{}"})
    assert made["id"].startswith("call_")
    assert chunks[-1].finish_reason == "tool_calls"


def test_the_list_of_calls_has_none_that_was_cut_off(client, worker, tokenizer):
    note = '<｜DSML｜invoke name="note">\n<｜DSML｜parameter name="text" string="true">a "b"'
    closing = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
    worker.script = saying(f"\n\n<｜DSML｜tool_calls>\n{note}{closing}{note}", tokenizer)
    last = ask(client, chat())[-1]
    (made,) = json.loads(last.tool_calls_json)
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("note", {"text": 'a "b"'})


def test_a_worker_that_goes_on_after_its_calls_is_stopped(client, worker, tokenizer):
    call = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    worker.script = lambda generate: itertools.chain(saying(call, tokenizer)(generate), Gate(tokenizer)(generate))
    assert ask(client, chat())[-1].finish_reason == "tool_calls"
    until(lambda: worker.num_cancelled == 1, "the worker hears of it")


def test_cancel_ends_with_what_was_said(client, worker, tokenizer):
    worker.script = Gate(tokenizer)
    request = client.start(chat())
    first = client.poll(10.0)
    assert first is not None
    client.cancel(request)
    chunks = collect(client, request)
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].completion_tokens >= 1
    until(lambda: worker.num_cancelled == 1, "the worker hears of it")


def test_a_client_that_leaves_is_cancelled(config, worker, tokenizer, client):
    worker.script = Gate(tokenizer)
    with connected(config) as other:
        other.start(chat())
        assert other.poll(10.0) is not None
    until(lambda: worker.num_cancelled == 1, "the worker hears of it")
    worker.script = saying(ANSWER, tokenizer)
    assert text_of(ask(client, chat())) == ANSWER


def test_queue_is_limited(config, client, worker, tokenizer):
    """Two with the worker, three waiting here, the sixth refused; then all are answered."""
    gate = worker.script = Gate(tokenizer)
    requests = [client.start(chat([{"role": "user", "content": str(i)}])) for i in range(5)]
    until(lambda: len(worker.begun) == 2, "two requests at the worker")
    until(lambda: stats(config)["requests_waiting"] == 3, "three waiting")
    with pytest.raises(ServiceError, match=r"3 requests wait already \(front\.max_queue\)") as caught:
        client.call(chat(), 10.0)
    assert caught.value.code is ErrorCode.NO_CAPACITY
    gate.open.set()
    finals = collect_all(client, requests)
    assert {final.finish_reason for final in finals.values()} == {"stop"}
    order = [tokenizer.encode([(f"<｜User｜>{i}", True)])[1] for i in range(5)]
    asked = [generate.prompt_ids[2] for generate in worker.begun]
    assert sorted(asked) == sorted(order)


def test_a_waiting_request_can_be_cancelled(config, client, worker, tokenizer):
    worker.script = Gate(tokenizer)
    requests = [client.start(chat()) for _ in range(3)]
    until(lambda: len(worker.begun) == 2, "two requests at the worker")
    client.cancel(requests[2])
    assert collect(client, requests[2])[-1].completion_tokens == 0
    worker.script.open.set()
    assert len(collect_all(client, requests[:2])) == 2
    assert len(worker.begun) == 2


def test_a_full_worker_is_asked_again(config, client, worker, tokenizer, monkeypatch):
    refusals = iter(range(3))
    accept = worker._answer

    def refuse_some(request, generate):
        if next(refusals, None) is not None:
            request.fail(ErrorCode.NO_CAPACITY, "full")
        else:
            accept(request, generate)

    monkeypatch.setattr(worker, "_answer", refuse_some)
    assert text_of(ask(client, chat())) == ANSWER


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Chat("{", 5), "messages is not JSON"),
        (Chat("[]", 5), "messages must be a list with at least one message"),
        (Chat('"hi"', 5), "messages must be a list"),
        (Chat("[" * 200_000, 5), "nested too deeply"),
        (Chat('[{"role": "user", "content": "\\ud800"}]', 5), "half a surrogate pair"),
        (chat([{"role": "robot", "content": ""}]), r"messages\[0\]\.role must be one of"),
        (
            chat([{"role": "user", "content": [{"type": "image_url"}]}]),
            r"messages\[0\]\.content\[0\]: only parts of type",
        ),
        (chat([{"role": "system", "content": "Be kind."}]), "messages must end with what the model should answer"),
        (chat([*HELLO, {"role": "assistant", "content": "Hi."}]), "one of the assistant that has prefix: true"),
        (Chat(json.dumps(HELLO), 5, options_json="[]"), "options must be an object"),
        (Chat(json.dumps(HELLO), 5, options_json="{"), "options is not JSON"),
        (chat(colour="red"), r"options\.colour is unknown \(known: thinking, "),
        (chat(thinking="yes"), r"options\.thinking cannot be 'yes'"),
        (chat(thinking=True, reasoning_effort="max"), "reasoning_effort 'max' is not one of this checkpoint's: none"),
        (chat(tools=[{"function": {"name": "f"}}]), "tools: this checkpoint has no encoding"),
        (chat(max_tokens=-1), "max_tokens must be at least 1, not -1"),
        (chat([{"role": "user", "content": "ab " * 600}]), r"the prompt has \d+ tokens, but model\.max_context = 512"),
        (chat([{"role": "user", "content": "a" * 10**6}]), r"the prompt has at least \d+ tokens, .* = 512 leaves room"),
    ],
)
def test_bad_requests_are_told_why(client, worker, message, complaint):
    with pytest.raises(ServiceError, match=complaint) as caught:
        client.call(message, 10.0)
    assert caught.value.code is ErrorCode.BAD_REQUEST
    assert worker.begun == []


def test_text_parts_are_joined(client, worker, tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    ask(client, chat([{"role": "user", "content": parts}]))
    expected = "<｜begin▁of▁sentence｜><｜User｜>one\n\ntwo<｜Assistant｜></think>"
    assert list(worker.begun[-1].prompt_ids) == tokenizer.encode([(expected, True)])


def test_other_messages_are_unsupported(client):
    with pytest.raises(ServiceError, match="does not answer Generate") as caught:
        client.call(Generate((1,), 1), 10.0)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_worker_errors_pass_through(client, worker, monkeypatch):
    monkeypatch.setattr(worker, "_answer", lambda request, _: request.fail(ErrorCode.IO_ERROR, "shard 3: gone"))
    with pytest.raises(ServiceError, match="shard 3: gone") as caught:
        client.call(chat(), 10.0)
    assert caught.value.code is ErrorCode.IO_ERROR


def test_a_lost_worker_ends_what_runs_and_comes_back(tmp_path, tokenizer):
    """One clear error per running request, at once; the front waits and serves the next worker."""
    path = write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"))
    config = load_config(path)
    config.run_dir.mkdir(mode=0o700)
    with doomed_worker(path) as doomed, running(path, "front") as front, connected(config) as client:
        requests = [client.start(chat()) for _ in range(2)]
        assert client.poll(10.0) is not None
        killed = time.monotonic()
        doomed.kill()
        for request in requests:
            with pytest.raises(ServiceError, match="the worker went away while this request ran") as caught:
                client.finish(request, 5.0)
            assert caught.value.code is ErrorCode.PEER_LOST
        assert time.monotonic() - killed < 0.5
        until(lambda: ping(config, "front", 1.0).detail == "waiting for the worker", "the front says it waits")
        with pytest.raises(ServiceError, match="the worker is not there yet") as caught:
            client.call(chat(), 5.0)
        assert caught.value.code is ErrorCode.STARTING
        with fake_worker(config, saying(ANSWER, tokenizer)):
            front.wait_ready("front")
            assert text_of(ask(client, chat())) == ANSWER


def test_a_hung_worker_is_noticed(tmp_path):
    """A stopped process keeps its sockets open: only its silence tells. Takes the ping's time-out of 5 s."""
    path = write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"))
    config = load_config(path)
    config.run_dir.mkdir(mode=0o700)
    with doomed_worker(path) as doomed, running(path, "front"), connected(config) as client:
        request = client.start(chat())
        assert client.poll(10.0) is not None
        doomed.send_signal(signal.SIGSTOP)
        with pytest.raises(ServiceError, match="the worker went away") as caught:
            client.finish(request, 10.0)
        assert caught.value.code is ErrorCode.PEER_LOST


def test_counts(config, client, worker):
    before = stats(config)
    ask(client, chat())
    ask(client, chat(max_tokens=2))
    with pytest.raises(ServiceError):
        client.call(chat(max_tokens=-1), 10.0)
    until(lambda: stats(config)["requests_failed"] == before["requests_failed"] + 1, "the failure is counted")
    after = stats(config)
    gained = {key: after[key] - before[key] for key in after}
    assert (gained["requests_done"], gained["requests_cancelled"], gained["requests_refused"]) == (2, 0, 0)
    assert gained["generated_tokens"] > 2
    assert gained["prompt_tokens"] == sum(len(g.prompt_ids) for g in worker.begun)
    assert (gained["ttft_count"], gained["answers_repaired"]) == (2, 0)
    assert gained["ttft_seconds"] > 0
    assert (after["requests_running"], after["requests_waiting"], after["worker_connected"]) == (0, 0, 1)


def test_many_clients_at_once(config, worker, tokenizer):
    """Each gets its own answer, to the last letter."""

    def answer(generate):
        return tokenizer.encode([("echo ", False)]) + list(generate.prompt_ids[2:-2])

    worker.script = answer
    wrong = []

    def one(number):
        with connected(config) as client:
            for turn in range(3):
                question = f"client {number} turn {turn}"
                while True:
                    try:
                        said = text_of(ask(client, chat([{"role": "user", "content": question}])))
                    except ServiceError as error:
                        if error.code is ErrorCode.NO_CAPACITY:
                            continue
                        raise
                    break
                if said != f"echo {question}":
                    wrong.append((question, said))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    until(lambda: stats(config)["requests_running"] == 0, "nothing runs any more")


def collect_all(client, requests):
    finals = {}
    while len(finals) < len(requests):
        event = client.poll(10.0)
        assert event is not None, finals
        assert isinstance(event[1], TextChunk), event
        if event[1].finish_reason:
            finals[event[0]] = event[1]
    return finals


def stats(config):
    """A snapshot made after this call."""
    subscriber = StatsSubscriber([config.endpoint("front.stats")])
    try:
        snapshot = subscriber.poll(10.0)
        assert snapshot is not None
        return snapshot.values
    finally:
        subscriber.close()


def test_stops_while_answers_run(tmp_path, tokenizer):
    """SIGTERM: what runs ends with `draining`, the process with 0, in time, and no socket stays."""
    path = write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"))
    config = load_config(path)
    with fake_worker(config, Gate(tokenizer)) as worker:
        stack = Stack(path)
        try:
            stack.start("front")
            stack.wait_ready("front")
            with connected(config) as client:
                request = client.start(chat())
                until(lambda: len(worker.begun) == 1, "the request runs")
                started = time.monotonic()
                stack.processes["front"].send_signal(signal.SIGTERM)
                with pytest.raises(ServiceError, match="front is stopping") as caught:
                    client.finish(request, 5.0)
                assert caught.value.code is ErrorCode.DRAINING
                assert stack.processes["front"].wait(5.0) == 0, stack.log("front")
                assert time.monotonic() - started < 3.0
        finally:
            for process in stack.processes.values():
                process.kill()
                process.wait()
    assert sorted(p.name for p in config.run_dir.iterdir() if p.is_socket()) == []


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json: cannot read the tokenizer"),
        (lambda model: (model / "tokenizer.json").write_text("{"), "tokenizer.json: not a usable tokenizer"),
        (lambda model: (model / "config.json").unlink(), "config.json"),
        (lambda model: shrink_vocabulary(model), "ids up to 511, but the model has only 100"),
        (lambda model: write_encoder(model), "encoding_dsv4.py: cannot read the chat format"),
    ],
)
def test_unusable_checkpoints_end_the_front(tmp_path, damage, complaint):
    model = make_checkpoint(tmp_path / "model")
    damage(model)
    path = write_config(tmp_path / "c.toml", model)
    run = subprocess.run(
        [sys.executable, "-m", "services.front", "--config", str(path)], capture_output=True, text=True, timeout=30
    )
    assert (run.returncode, "Traceback" in run.stderr) == (78, False), run.stderr
    assert complaint in run.stderr


def shrink_vocabulary(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))


def write_encoder(model):
    (model / "encoding").mkdir()
    (model / "encoding" / "encoding_dsv4.py").write_text("TOOLS_TEMPLATE = 5")


def test_a_bad_config_ends_the_front(tmp_path):
    (tmp_path / "c.toml").write_text("[nonsense]\n")
    run = subprocess.run(
        [sys.executable, "-m", "services.front", "--config", str(tmp_path / "c.toml")],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 78
    assert run.stderr.startswith("front: ")
    assert "nonsense" in run.stderr
