"""What the front adds to the worker's own time: to the first token, and to each streamed token.

`python -m benchmarks.front_overhead [--rounds R] [--tokens N]`. A worker in this process says a token every few
milliseconds and notes when. The same request goes to it directly and through the front's HTTP, in turns; what counts
is from sending the request to its beginning at the worker, from the worker's sending of a token to its arrival, and by
how much the whole stream takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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
_PIECE = re.compile(rb'"content":"(a+)"')


@dataclass(slots=True)
class Pace:
    """The worker's script: one token a `PACE_S`, and when the request began and each token was ready."""

    token: int
    begun: float = 0.0
    ready: list[float] = field(default_factory=list)

    def __call__(self, generate: Generate) -> Iterator[int]:
        self.begun, self.ready = time.perf_counter(), []
        for _ in range(generate.max_tokens):
            time.sleep(PACE_S)
            self.ready.append(time.perf_counter())
            yield self.token


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds: until the worker began, from there until the first token arrived, and for each token to arrive."""

    to_worker: float
    to_client: tuple[float, ...]


def direct(client: BlockingClient, generate: Generate, pace: Pace) -> Sample:
    started = time.perf_counter()
    request_id = client.start(generate)
    arrived: list[float] = []
    while True:
        event = client.poll(10.0)
        assert event is not None
        assert event[0] == request_id
        assert isinstance(event[1], TokensGenerated), event
        if event[1].token_ids:
            arrived.append(time.perf_counter())
        if event[1].finish_reason:
            return _sample(started, arrived, pace)


def through_front(connection: socket.socket, body: bytes, pace: Pace) -> Sample:
    """One connection for all requests, and each sent in one piece, as a proxy would."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    started = time.perf_counter()
    connection.sendall(head.encode() + body)
    arrived: list[float] = []
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received = connection.recv(65536)
        if pieces := _PIECE.findall(received):  # pieces that wait for their reader join
            arrived += [time.perf_counter()] * sum(map(len, pieces))
    return _sample(started, arrived, pace)


def _sample(started: float, arrived: list[float], pace: Pace) -> Sample:
    assert len(arrived) == len(pace.ready), f"{len(arrived)} letters for {len(pace.ready)} tokens"
    delays = tuple(there - here for there, here in zip(arrived, pace.ready, strict=True))
    return Sample(pace.begun - started, delays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        path = write_config(folder / "c.toml", make_checkpoint(folder / "model"), front={"http_port": 0})
        config = load_config(path)
        pace = Pace(Tokenizer.load(config.model.path).encode([("a", False)])[0])
        with fake_worker(config, pace), running(path, "front") as stack:
            process = psutil.Process(stack.processes["front"].pid)
            figures = measure(config, pace, process, args.rounds, args.tokens)
    show("The front's share", {key: f"{value:.3f}" for key, value in figures.items()})
    save("front_overhead", figures)


def measure(config: Config, pace: Pace, process: psutil.Process, rounds: int, tokens: int) -> dict[str, float]:
    """Medians over all rounds, in milliseconds."""
    host, port = (config.run_dir / "front.http").read_text().strip().removeprefix("http://").split(":")
    messages = [{"role": "user", "content": "word " * WORDS}]
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": tokens, "temperature": 0}).encode()
    client = BlockingClient(config.endpoint("worker"), make_identity("benchmark"))
    client.connect(10.0)
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    through_front(connection, body, pace)  # the first answer of a process is slower
    alone, front, cpu_s = [], [], 0.0
    for _ in range(rounds):
        alone.append(direct(client, Generate(tuple(range(2, 30)), tokens, temperature=0.0), pace))
        before = sum(process.cpu_times()[:2])
        front.append(through_front(connection, body, pace))
        cpu_s += sum(process.cpu_times()[:2]) - before
    client.close()
    connection.close()
    first = [_median([s.to_worker + s.to_client[0] for s in samples]) for samples in (alone, front)]
    each = [_median([delay for s in samples for delay in s.to_client]) for samples in (alone, front)]
    return {
        "load_average": os.getloadavg()[0],
        "first_token_direct_ms": first[0],
        "first_token_front_ms": first[1],
        "first_token_added_ms": first[1] - first[0],
        "token_direct_ms": each[0],
        "token_front_ms": each[1],
        "token_added_ms": each[1] - each[0],
        "stream_longer_per_token_ms": _median([_stretch(s) for s in front]) - _median([_stretch(s) for s in alone]),
        "front_cpu_per_token_ms": 1000 * cpu_s / (rounds * tokens),
    }


def _stretch(sample: Sample) -> float:
    """By how much a stream takes longer to arrive than to be made, a token."""
    return (sample.to_client[-1] - sample.to_client[0]) / (len(sample.to_client) - 1)


def _median(seconds: list[float]) -> float:
    return 1000 * statistics.median(seconds)


if __name__ == "__main__":
    main()
