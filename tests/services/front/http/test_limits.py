"""The HTTP side as a process, with a worker of the test's own: queue, cancels, limits, slow and vanished clients."""

import itertools
import json
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager

import httpx2
import pytest
from helpers.fake_worker import fake_worker, make_checkpoint, saying, until
from helpers.front import front_stats, url_of
from helpers.icebox import icebox
from helpers.services import ROOT, running, write_config

from services.front.chat.format import USER
from services.front.tokenizer import Tokenizer
from shared.config import load_config

ANSWER = "The tide turns at noon — ask the keeper."
BODY = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


@contextmanager
def fronted(folder, **front):
    """A front that is READY, and its worker."""
    keys = {"http_port": 0, "max_queue": 3} | front
    path = write_config(folder / "c.toml", make_checkpoint(folder / "model"), front=keys, worker={"max_queue": 2})
    config = load_config(path)
    tokenizer = Tokenizer.load(config.model.path)
    with fake_worker(config, saying(ANSWER, tokenizer)) as worker, running(path, "front") as stack:
        yield stack, worker
        assert "Traceback" not in stack.log("front"), stack.log("front")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    with fronted(tmp_path_factory.mktemp("limits"), max_body_bytes="64 KiB") as both:
        yield both


@pytest.fixture
def stack(everything):
    return everything[0]


@pytest.fixture
def worker(everything):
    worker = everything[1]
    worker.script = saying(ANSWER, worker.tokenizer)
    worker.begun.clear()
    worker.num_cancelled = 0
    return worker


@pytest.fixture
def client(stack, worker):
    with httpx2.Client(base_url=url_of(stack), timeout=20.0) as connected:
        yield connected
    until(lambda: front_stats(stack)["requests_running"] == 0, "nothing runs any more")


class Gate:
    """A script that gives one token, then waits to be opened, and then says the answer."""

    def __init__(self, worker):
        self.answer = worker.tokenizer.encode([(ANSWER, True)])
        self.open = threading.Event()

    def __call__(self, _generate):
        yield self.answer[0]
        while not self.open.wait(0.005):
            yield 68
        yield from self.answer[1:]


def events(response):
    """The payloads of a stream, and its comments."""
    payloads, comments = [], []
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            payloads.append(json.loads(line.removeprefix("data: ")))
        elif line.startswith(":"):
            comments.append(line.removeprefix(": "))
    return payloads, comments


def text_of(payloads):
    deltas = [choice["delta"] for payload in payloads for choice in payload["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


def test_an_answer(client):
    answer = client.post(CHAT, json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    assert answer.headers["x-queue-place"] == "0"
    assert answer.json()["id"] == "chatcmpl-" + answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", CHAT, b"{", 400, "bad_request"),
        ("POST", CHAT, b"[" * 50_000, 400, "bad_request"),
        ("POST", CHAT, b"x" * 70_000, 413, "request_entity_too_large"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
        ("DELETE", f"{CHAT}/chatcmpl-1", None, 404, "not_found"),
    ],
)
def test_refusals_are_json(client, method, path, content, status, code):
    answer = client.request(method, path, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert client.post(CHAT, json=BODY).status_code == 200


def test_a_body_without_a_length_is_limited_too(client):
    answer = client.post(CHAT, content=itertools.repeat(b" " * 1000, 100))
    assert answer.status_code == 413


def test_the_queue_tells_each_its_place(client, stack, worker):
    """Two with the worker, three waiting, the sixth refused; each hears how many are before it, until none is."""
    gate = worker.script = Gate(worker)
    answers = {}
    with ExitStack() as streams:
        for i in range(5):
            answers[i] = streams.enter_context(client.stream("POST", CHAT, json=BODY | {"stream": True}))
        assert [answer.headers["x-queue-place"] for answer in answers.values()] == ["0", "1", "2", "3", "4"]
        refused = client.post(CHAT, json=BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) > 0
        assert "front.max_queue" in refused.json()["error"]["message"]
        gate.open.set()
        for i, answer in answers.items():
            payloads, comments = events(answer)
            assert text_of(payloads).endswith(ANSWER[3:])
            places = [int(c.removeprefix("queue place=")) for c in comments if c.startswith("queue")]
            assert places[0] == i
            assert places == sorted(places, reverse=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_queued", [False, True])
def test_a_client_that_leaves_cancels_what_it_asked(client, stack, worker, stream, is_queued):
    gate = worker.script = Gate(worker)
    before = front_stats(stack)["requests_cancelled"]
    with ExitStack() as others:
        for _ in range(2 if is_queued else 0):
            others.enter_context(client.stream("POST", CHAT, json=BODY | {"stream": True}))
        leaver = raw_request(stack, json.dumps(BODY | {"stream": stream}).encode())
        until(lambda: running_and_waiting(stack) == (3 if is_queued else 1), "it is there")
        leaver.close()
        until(lambda: running_and_waiting(stack) == (2 if is_queued else 0), "it is gone")
        assert front_stats(stack)["requests_cancelled"] == before + 1
        gate.open.set()
    assert len(worker.begun) == (2 if is_queued else 1)


def running_and_waiting(stack):
    stats = front_stats(stack)
    return stats["requests_running"] + stats["requests_waiting"]


def raw_request(stack, body, connect_to=None):
    """A connection that has sent a request and reads nothing."""
    host, port = url_of(stack).removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_queued_answer_can_be_cancelled_from_elsewhere(client, worker):
    gate = worker.script = Gate(worker)
    with ExitStack() as streams:
        for _ in range(2):
            streams.enter_context(client.stream("POST", CHAT, json=BODY | {"stream": True}))
        queued = streams.enter_context(client.stream("POST", CHAT, json=BODY | {"stream": True}))
        assert client.delete(f"{CHAT}/chatcmpl-{queued.headers['x-request-id']}").status_code == 200
        payloads, _ = events(queued)
        assert payloads[-1]["choices"][0]["finish_reason"] == "abort"
        gate.open.set()
    assert len(worker.begun) == 2


def test_a_slow_reader_holds_nobody_up(client, stack, worker):
    """It has asked for far more than sockets buffer and reads nothing; the other answers come, and then it gets its."""
    token = worker.tokenizer.encode([("a", False)])[0]
    worker.script = lambda generate: itertools.repeat(token, generate.max_tokens)
    body = BODY | {"stream": True, "max_tokens": 400, "logprobs": False}
    slow = [raw_request(stack, json.dumps(body).encode()) for _ in range(2)]
    for _ in range(3):
        assert client.post(CHAT, json=BODY | {"max_tokens": 5}).status_code == 200
    for connection in slow:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            piece = connection.recv(65536)
            assert piece, "the front hung up"
            received += piece
        assert b"[DONE]" in received
        connection.close()


def test_many_connections_are_kept_apart(client, stack, worker):
    """Garbage on some connections, answers on the others."""
    host, port = url_of(stack).removeprefix("http://").split(":")
    for garbage in (b"\x00" * 100, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 50):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(garbage)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")
    assert client.post(CHAT, json=BODY).status_code == 200


def test_a_request_that_takes_too_long_is_504(tmp_path):
    with fronted(tmp_path, request_timeout_s=1) as (stack, worker):
        worker.script = Gate(worker)
        with httpx2.Client(base_url=url_of(stack), timeout=20.0) as client:
            answer = client.post(CHAT, json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            assert "front.request_timeout_s" in answer.json()["error"]["message"]
            with client.stream("POST", CHAT, json=BODY | {"stream": True}) as stream:
                payloads, _ = events(stream)
            assert payloads[-1]["error"]["code"] == "timeout"
        until(lambda: worker.num_cancelled == 2, "the worker hears of both")


def test_control_tokens_count_where_the_config_trusts_them(tmp_path):
    body = {"messages": [{"role": "user", "content": f"Hello{USER}Hello"}]}
    with fronted(tmp_path, trust_control_tokens=True) as (stack, worker):
        assert httpx2.post(url_of(stack) + CHAT, json=body).status_code == 200
        assert worker.begun[0].prompt_ids.count(worker.tokenizer.control_id(USER)) == 2


def test_a_key_and_a_worker_that_is_not_there(tmp_path):
    with fronted(tmp_path, api_key="s3cret") as (stack, worker):
        with httpx2.Client(base_url=url_of(stack), timeout=20.0) as client:
            answer = client.post(CHAT, json=BODY)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            headers = {"authorization": "Bearer s3cret"}
            assert client.post(CHAT, json=BODY, headers=headers).status_code == 200
            worker.stop()
            until(lambda: client.post(CHAT, json=BODY, headers=headers).status_code == 503, "the loss is seen")
            answer = client.post(CHAT, json=BODY, headers=headers)
            assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("starting", "2")
            assert client.get("/metrics", headers=headers).status_code == 200
        assert "s3cret" not in stack.log("front")


def test_stops_while_answers_run(tmp_path):
    """SIGTERM: what runs ends with `draining`, the process with 0, in time, and the address file is gone."""
    with fronted(tmp_path) as (stack, worker):
        worker.script = Gate(worker)
        with httpx2.stream("POST", url_of(stack) + CHAT, json=BODY | {"stream": True}, timeout=20.0) as stream:
            until(lambda: len(worker.begun) == 1, "it runs")
            assert stack.terminate("front") == 0
            payloads, _ = events(stream)
        assert payloads[-1]["error"]["code"] == "draining"
        assert not (stack.config.run_dir / "front.http").exists()


def test_status_says_where_it_is_as_long_as_it_lives(tmp_path):
    with fronted(tmp_path) as (stack, _):
        url = url_of(stack)
        assert front_line(stack).endswith(url)
        stack.kill("front")
        assert front_line(stack) == "front    not running"
        stack.start("front")
        stack.wait_ready("front")
        assert front_line(stack).endswith(url_of(stack))


def front_line(stack):
    lines = icebox("status", config=stack.config_path).stdout.splitlines()
    return next(line for line in lines if line.startswith("front"))


def run_front(path):
    command = [sys.executable, "-m", "services.front", "--config", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)


def test_a_port_that_is_taken_ends_the_front(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"), front={"http_port": port})
        run = run_front(path)
    assert (run.returncode, "Traceback" in run.stderr) == (75, False), run.stderr
    assert f"front.http_port = {port}: another program listens there" in run.stderr


def test_an_address_of_another_machine_ends_the_front(tmp_path):
    front = {"http_port": 0, "http_host": "203.0.113.7", "api_key": "k"}
    run = run_front(write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"), front=front))
    assert (run.returncode, "Traceback" in run.stderr) == (78, False), run.stderr
    assert "front.http_host = '203.0.113.7', front.http_port = 0: cannot listen there" in run.stderr


def test_two_fronts_have_two_ports(tmp_path):
    stacks = []
    with ExitStack() as both:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            stacks.append(both.enter_context(fronted(tmp_path / name))[0])
        first, second = map(url_of, stacks)
        assert first != second
        assert httpx2.get(f"{first}/v1/models").status_code == httpx2.get(f"{second}/v1/models").status_code == 200


def test_without_a_port_there_is_no_http(tmp_path):
    path = write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"))
    config = load_config(path)
    with fake_worker(config, saying(ANSWER, Tokenizer.load(config.model.path))), running(path, "front") as stack:
        assert not (stack.config.run_dir / "front.http").exists()
