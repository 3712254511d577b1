"""Many clients at once against the running demo, and many that vanish at random moments.

`python -m benchmarks.front_load [--clients N] [--vanishing N] [--seed S]`. What must hold: every answer is complete and
the one that its client gets alone, memory and descriptors stay bounded, and after the vanished ones the next request
is served at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import save, show
from shared.stats import StatsSubscriber
from tests.helpers.services import ROOT, Stack, running, write_config

PATH = "/v1/chat/completions"
MAX_TOKENS = 40
# How long the services may take to forget everything that vanished.
SETTLE_S = 30.0
VANISHING_AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Answered:
    """A complete streamed answer; times in seconds since the request."""

    text: str
    finish_reason: str
    ttft_s: float
    elapsed_s: float


def demo_config(folder: Path) -> Path:
    """The demo checkpoint, with HTTP on a free port."""
    sections: dict[str, dict[str, object]] = {"cache": {"bytes": "8 MiB"}, "front": {"http_port": 0}}
    return write_config(folder / "icebox.toml", ROOT / "demo" / "checkpoint", **sections)


def url_of(stack: Stack) -> str:
    return (stack.config.run_dir / "front.http").read_text(encoding="ascii").strip()


def question(number: int) -> str:
    return f"What is {number % 89 + 10} + {number % 83 + 11}?"


def request_bytes(url: str, text: str, *, max_tokens: int = MAX_TOKENS) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True, "max_tokens": max_tokens}
    data = json.dumps(body).encode()
    host = url.removeprefix("http://")
    head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    return head.encode() + data


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def ask(url: str, text: str) -> Answered:
    """One streamed answer over a connection of its own."""
    started = time.perf_counter()
    reader, writer = await connect(url)
    try:
        writer.write(request_bytes(url, text))
        said, finish_reason, ttft_s = "", "", 0.0
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            piece = choice["delta"].get("content") or ""
            if piece and not ttft_s:
                ttft_s = time.perf_counter() - started
            said += piece
            finish_reason = choice["finish_reason"] or finish_reason
        return Answered(said, finish_reason, ttft_s, time.perf_counter() - started)
    finally:
        writer.close()


async def ask_together(url: str, count: int) -> tuple[list[Answered], list[Answered]]:
    """Each client's answer alone and one after the other, then all of them at the same time."""
    alone = [await ask(url, question(i)) for i in range(count)]
    together = await asyncio.gather(*(ask(url, question(i)) for i in range(count)))
    return alone, list(together)


async def vanish(url: str, count: int, seed: int) -> None:
    """Clients that go away at a random moment, most of them without a goodbye."""
    rng = random.Random(seed)
    turns = asyncio.Semaphore(VANISHING_AT_ONCE)

    async def one(rng: random.Random) -> None:
        async with turns:
            await _vanish(url, rng)

    await asyncio.gather(*(one(random.Random(rng.random())) for _ in range(count)))


async def _vanish(url: str, rng: random.Random) -> None:
    reader, writer = await connect(url)
    request = request_bytes(url, "Tell me a story about a cat.", max_tokens=500)
    try:
        sent = rng.choice((0, rng.randrange(len(request)), len(request), len(request)))
        writer.write(request[:sent])
        await writer.drain()
        if sent == len(request) and rng.random() < 0.7:
            await asyncio.wait_for(reader.read(rng.randrange(1, 2000)), rng.random())
        else:
            await asyncio.sleep(rng.random() * 0.1)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if rng.random() < 0.7:  # a reset instead of a goodbye
            plain = writer.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


class Watch:
    """What the front's process holds."""

    def __init__(self, stack: Stack) -> None:
        self._config = stack.config
        self._process = psutil.Process(stack.processes["front"].pid)

    def held(self) -> dict[str, float]:
        """Open requests, connections, descriptors, threads and memory."""
        front, worker = self.stats("front"), self.stats("worker")
        return {
            "requests": front["requests_running"] + front["requests_waiting"],
            "http_requests": front["http_requests"],
            "http_connections": front["http_connections"],
            "worker_requests": worker["requests_running"] + worker["requests_waiting"],
            "descriptors": self._process.num_fds(),
            "threads": self._process.num_threads(),
            "mib": round(self._process.memory_info().rss / 2**20, 1),
        }

    def stats(self, service: str) -> dict[str, float]:
        """Counters in a snapshot taken after this call."""
        subscriber = StatsSubscriber([self._config.endpoint(f"{service}.stats")])
        asked = time.time()
        try:
            while (snapshot := subscriber.poll(5.0)) is not None:
                if snapshot.time_s > asked:
                    return snapshot.values
            raise AssertionError(f"no statistics of the {service}")
        finally:
            subscriber.close()

    def settled(self) -> dict[str, float]:
        """What is held once nothing is open any more."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            held = self.held()
            if not any(held[key] for key in ("requests", "http_requests", "http_connections", "worker_requests")):
                return held
            assert time.monotonic() < deadline, f"still held: {held}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--vanishing", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, running(demo_config(Path(directory))) as stack:
        figures = {"load_average": os.getloadavg()[0], **measure(stack, args.clients, args.vanishing, args.seed)}
    show("Load", {key: json.dumps(value) for key, value in figures.items()})
    save("front_load", figures)


def measure(stack: Stack, clients: int, vanishing: int, seed: int) -> dict[str, Any]:
    url, watch = url_of(stack), Watch(stack)
    asyncio.run(ask(url, question(0)))
    before = watch.settled()
    alone, together = asyncio.run(ask_together(url, clients))
    assert [a.text for a in together] == [a.text for a in alone], "an answer is not its client's own"
    assert all(a.finish_reason == "stop" for a in together)
    after_clients = watch.settled()
    asyncio.run(vanish(url, vanishing, seed))
    next_answer = asyncio.run(ask(url, question(1)))
    assert next_answer.text == alone[1 % clients].text
    return {
        "clients": clients,
        "distinct_answers": len({a.text for a in together}),
        "last_answer_s": max(a.elapsed_s for a in together),
        "alone_in_turn_s": sum(a.elapsed_s for a in alone),
        "vanished": vanishing,
        "next_ttft_s": next_answer.ttft_s,
        "next_alone_ttft_s": sorted(a.ttft_s for a in alone)[len(alone) // 2],
        "held_before": before,
        "held_after_clients": after_clients,
        "held_after_vanished": watch.settled(),
    }


if __name__ == "__main__":
    main()
