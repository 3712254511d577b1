"""What the front adds to the worker's own time: to the first token, to each token's arrival, and to a whole stream.

`python -m benchmarks.front_overhead [--rounds R] [--tokens N]`. A worker says a token every few milliseconds. The same
request goes to it directly, over the socket that the front uses, and through the front's HTTP, in turns. What counts is

* the first token: from sending the request until its first token is there, but for the worker's pause before it;
* each token: from the worker's having it until it is there;
* the stream: from the first arrival to the last, for each token after the first.

A token is there when the client has its text or its id. What is added is the median over all rounds of the difference
between a round's two requests, so that a machine that is slow for a while is slow for both. Worker, front and client
are processes of their own, as in a deployment: in one process the worker's threads and the client would wait for each
other's turn at the interpreter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from benchmarks.report import save, show
from services.front.tokenizer import Tokenizer
from shared.config import Config, load_config
from shared.protocol.messages import Generate, TokensGenerated
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient
from tests.helpers.fake_worker import fake_worker, make_checkpoint
from tests.helpers.services import running, write_config

PACE_S = 0.01
WORDS = 8
WORKER_START_S = 60.0
_PIECE = re.compile(rb'"content":"(a+)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, in seconds: what the first token took besides the pause, each token, and a token of the stream."""

    first: float
    each: float
    stretch: float


# -> the time of sending, and of every token's arrival
Ask = Callable[[], tuple[float, list[float]]]


def _work(config_path: Path, times: Connection) -> None:
    """The worker's process: one token a `PACE_S`, and for every request when it began and when each token was ready."""
    config = load_config(config_path)
    token = Tokenizer.load(config.model.path).encode([("a", False)])[0]

    def script(generate: Generate) -> Iterator[int]:
        begun, ready = time.perf_counter(), []
        for i in range(generate.max_tokens):
            time.sleep(PACE_S)
            ready.append(time.perf_counter())
            if i + 1 == generate.max_tokens:
                times.send((begun, ready))  # the script is not resumed after its last token
            yield token

    with fake_worker(config, script):
        times.send(None)
        times.recv()


@contextmanager
def worker(config_path: Path) -> Iterator[Connection]:
    """A worker in a process of its own, and the times of its requests. Its clock (perf_counter) is ours."""
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(config_path, its))
    process.start()
    try:
        assert ours.poll(WORKER_START_S), "the worker does not start"
        ours.recv()
        yield ours
    finally:
        ours.send(None)
        process.join()


def directly(client: BlockingClient, generate: Generate) -> tuple[float, list[float]]:
    started = time.perf_counter()
    client.start(generate)
    arrived: list[float] = []
    while True:
        event = client.poll(10.0)
        assert event is not None
        assert isinstance(event[1], TokensGenerated), event
        if event[1].token_ids:
            arrived.append(time.perf_counter())
        if event[1].finish_reason:
            return started, arrived


def through_front(connection: socket.socket, body: bytes) -> tuple[float, list[float]]:
    """One connection for all requests, and each sent in one piece, as a proxy would."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    started = time.perf_counter()
    connection.sendall(head.encode() + body)
    arrived: list[float] = []
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received = connection.recv(65536)
        assert received, "the front hung up"
        if pieces := _PIECE.findall(received):  # pieces that wait for their reader join
            arrived += [time.perf_counter()] * sum(map(len, pieces))
    return started, arrived


def sample(ask: Ask, times: Connection) -> Sample:
    started, arrived = ask()
    begun, ready = times.recv()
    assert len(arrived) == len(ready), f"{len(arrived)} letters for {len(ready)} tokens"
    delays = [there - here for there, here in zip(arrived, ready, strict=True)]
    stretch = (delays[-1] - delays[0]) / (len(delays) - 1)
    return Sample(begun - started + delays[0], statistics.median(delays), stretch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        path = write_config(folder / "c.toml", make_checkpoint(folder / "model"), front={"http_port": 0})
        with worker(path) as times, running(path, "front") as stack:
            process = psutil.Process(stack.processes["front"].pid)
            figures = measure(load_config(path), times, process, args.rounds, args.tokens)
    show("The front's share", {key: f"{value:.3f}" for key, value in figures.items()})
    save("front_overhead", figures)


def measure(config: Config, times: Connection, process: psutil.Process, rounds: int, tokens: int) -> dict[str, float]:
    """Medians over the rounds, in milliseconds."""
    host, port = (config.run_dir / "front.http").read_text().strip().removeprefix("http://").split(":")
    messages = [{"role": "user", "content": "word " * WORDS}]
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": tokens, "temperature": 0}).encode()
    generate = Generate(tuple(range(2, 30)), tokens, temperature=0.0)
    client = BlockingClient(config.endpoint("worker"), make_identity("benchmark"))
    client.connect(10.0)
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sample(lambda: through_front(connection, body), times)  # the first answer of a process is slower
    direct, front, cpu_s = [], [], 0.0
    for _ in range(rounds):
        direct.append(sample(lambda: directly(client, generate), times))
        before = sum(process.cpu_times()[:2])
        front.append(sample(lambda: through_front(connection, body), times))
        cpu_s += sum(process.cpu_times()[:2]) - before
    client.close()
    connection.close()
    figures = {"load_average": os.getloadavg()[0]}
    for name, key in {"first_token": "first", "token": "each", "stream_per_token": "stretch"}.items():
        pairs = [(getattr(d, key), getattr(f, key)) for d, f in zip(direct, front, strict=True)]
        figures[f"{name}_direct_ms"] = _median(d for d, _ in pairs)
        figures[f"{name}_front_ms"] = _median(f for _, f in pairs)
        figures[f"{name}_added_ms"] = _median(f - d for d, f in pairs)
    return figures | {"front_cpu_per_token_ms": 1000 * cpu_s / (rounds * tokens)}


def _median(seconds: Iterator[float]) -> float:
    return 1000 * statistics.median(seconds)


if __name__ == "__main__":
    main()
