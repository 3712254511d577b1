"""Fuzzed HTTP bodies and ZeroMQ frames against the front: no crash, no 500 without a reason in the log, no growth.

`python -m benchmarks.front_fuzz [--bodies N] [--frames N] [--seed S]`. Bodies go through the HTTP application in this
process, with a worker that answers at once; frames go to a front of its own process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import zmq
from starlette.types import ASGIApp

from benchmarks.report import save, show
from services.front.answers import Answers
from services.front.chat.format import ChatFormat
from services.front.http.app import make_app
from services.front.http.front import Front
from services.front.http.observer import Observer
from services.front.prompt import PromptMaker
from services.front.tokenizer import Tokenizer
from shared.config import load_config
from shared.protocol.codec import encode
from shared.protocol.messages import PROTOCOL_VERSION, Cancel, Chat, Generate, Hello, Ping, TextChunk, TokensGenerated
from shared.runtime.boot import make_identity
from shared.runtime.context import ServiceContext
from shared.transport.client import BlockingClient
from shared.transport.sockets import pack_id
from tests.helpers.fake_worker import fake_worker, make_checkpoint, saying
from tests.helpers.services import running, write_config

EXPECTED = frozenset((200, 400, 404, 405, 413, 429, 499, 503, 504))
IN_FLIGHT = 16

_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "ok"}]},
]
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FUNCTION = {"name": "f", "description": "d", "parameters": _PARAMETERS}
_BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
]
# One good body of every endpoint, with every field that it knows.
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": _MESSAGES,
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "seed": 1,
            "stop": ["x", "yz"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning_effort": "high",
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _PARAMETERS}},
        },
    ),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 3, "logprobs": 1, "stop": "x", "echo": False, "suffix": ""}),
    (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "Be kind."}],
            "messages": _BLOCKS,
            "tools": [{"name": "f", "input_schema": _PARAMETERS}],
            "tool_choice": {"type": "auto"},
            "stop_sequences": ["x"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "m", "messages": _BLOCKS}),
    (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "ok"},
            ],
            "tools": [{"type": "function", **_FUNCTION}],
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": _PARAMETERS}},
            "max_output_tokens": 5,
            "stream": False,
        },
    ),
)
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, 10**400, -0.5, 1e308, "", "x", "none", "required", "\ud800", "\x00",
    "<｜User｜>", "｜DSML｜", "a" * 3000, [], {}, [[]], [{}], {"": {}}, {"type": "text"}, {"type": "tool"}, ["x", 5],
)  # fmt: skip


def fuzzed_body(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a body that was good once."""
    path, body = rng.choice(GOOD)
    if rng.random() < 0.1:
        path = rng.choice(GOOD)[0]
    value = json.loads(json.dumps(body))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _mutate(value, rng)
    data = json.dumps(value).encode()
    if rng.random() < 0.2:
        data = _scramble(data, rng)
    return path, data


def _mutate(value: Any, rng: random.Random) -> None:
    """Change one place somewhere in this JSON value."""
    places = [(value, key) for key in (value if isinstance(value, dict) else range(len(value)))]
    if not places:
        return
    holder, key = rng.choice(places)
    if isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.7:
        _mutate(holder[key], rng)
        return
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("type", "name", "role", "content", "x"))] = copy.deepcopy(rng.choice(_ODD))
        case 2 if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        case _:
            holder[key] = copy.deepcopy(rng.choice(_ODD))


def _scramble(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut or insert bytes."""
    scrambled = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(scrambled) + 1)
        match rng.randrange(3):
            case 0:
                scrambled[place : place + 1] = rng.randbytes(1)
            case 1:
                del scrambled[place : place + rng.randrange(20)]
            case _:
                scrambled[place:place] = rng.randbytes(rng.randrange(4))
    return bytes(scrambled)


class _QuickLink:
    """A worker that says the same few tokens to everyone, at once."""

    is_connected = True

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._ids = token_ids

    async def generate(self, request: Generate, take: Callable[[TokensGenerated], bool]) -> None:
        ids = self._ids[: request.max_tokens]
        asked = request.top_logprobs >= 0
        for i, token in enumerate(ids, 1):
            finish = "" if i < len(ids) else "stop"
            logprobs = (-1.0,) if asked else ()
            top = (token,) * max(0, request.top_logprobs)
            n = len(request.prompt_ids)
            if not take(TokensGenerated((token,), finish, n, i, 0, 0.0, 0.0, logprobs, top, (-1.0,) * len(top))):
                return


@contextlib.contextmanager
def application(folder: Path) -> Iterator[tuple[ASGIApp, Answers]]:
    """The HTTP application, with a worker that answers at once. To be used within a running loop."""
    config = load_config(write_config(folder / "c.toml", make_checkpoint(folder / "model"), front={"http_port": 0}))
    tokenizer = Tokenizer.load(config.model.path)
    chat_format = ChatFormat("fuzz", "Tools: {tool_schemas}", "Schema: {schema}", {None: "", "high": "", "max": "!"})
    maker = PromptMaker(tokenizer, chat_format, config.model.max_context, config.front.default_max_tokens)
    answers = Answers(ServiceContext(config, make_identity("front")), tokenizer, maker)
    answers.link = _QuickLink(tuple(tokenizer.encode([("Hm.</think>It is noon.", True)])))  # type: ignore[assignment]
    with Observer(config) as observer:
        yield make_app(Front(config, answers, observer, "m", 0)), answers


async def fuzz_bodies(app: ASGIApp, count: int, seed: int) -> Counter[int]:
    """How often each status came. Raises what the application raises, and AssertionError for what it must not say."""
    statuses: Counter[int] = Counter()
    rng = random.Random(seed)
    turns = asyncio.Semaphore(IN_FLIGHT)

    async def one(path: str, data: bytes) -> None:
        try:
            status, body = await post(app, path, data)
            assert status in EXPECTED, (status, path, data)
            assert body, (status, path, data)
            statuses[int(status)] += 1
        finally:
            turns.release()

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            await turns.acquire()
            group.create_task(one(*fuzzed_body(rng)))
    return statuses


async def post(app: ASGIApp, path: str, data: bytes) -> tuple[int, bytes]:
    """Status and body of a POST, without a network."""
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost")], "http_version": "1.1", "scheme": "http", "root_path": "",
    }  # fmt: skip
    messages = [{"type": "http.request", "body": data, "more_body": False}]
    status, body = 0, b""

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()  # the client stays until the end
        return messages.pop(0)

    async def send(message: Any) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await app(scope, receive, send)
    return status, body


def fuzzed_frames(rng: random.Random) -> list[bytes]:
    """A multipart message as no honest peer would send it, or nearly."""
    good = rng.choice(
        (
            Hello(PROTOCOL_VERSION, "fuzz", "00"),
            Ping(),
            Cancel(rng.randrange(100)),
            Chat('[{"role": "user", "content": "Hello"}]', 3),
            Chat('[{"role": "user"', -5, options_json="[]"),
            TextChunk("a", "", "", "", 1, 1, 0, 0.0, 0.0),
        )
    )
    body = encode(good)
    if rng.random() < 0.7:
        body = _scramble(body, rng)
    frames = [pack_id(rng.randrange(1, 2**40)), body]
    match rng.randrange(6):
        case 0:
            frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 5))]
        case 1:
            frames[0] = rng.randbytes(rng.randrange(12))
        case 2:
            frames.insert(rng.randrange(3), b"")
    return frames


def fuzz_frames(endpoint: str, count: int, seed: int) -> int:
    """Send frames from a few peers, reading now and then; how many replies came."""
    rng = random.Random(seed)
    replies = 0
    with zmq.Context() as context:
        peers = [context.socket(zmq.DEALER) for _ in range(4)]
        for peer in peers:
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(endpoint)
        for i in range(count):
            peer = rng.choice(peers)
            peer.send_multipart(fuzzed_frames(rng))
            if i % 50 == 0:
                replies += sum(map(_drain, peers))
        while any(peer.poll(300) for peer in peers):
            replies += sum(map(_drain, peers))
        for peer in peers:
            peer.close()
    return replies


def _drain(peer: zmq.Socket[bytes]) -> int:
    count = 0
    with contextlib.suppress(zmq.Again):
        while True:
            peer.recv_multipart(zmq.NOBLOCK)
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "http").mkdir()
        (folder / "zmq").mkdir()
        bodies = asyncio.run(measure_bodies(folder / "http", args.bodies, args.seed))
        frames = measure_frames(folder / "zmq", args.frames, args.seed)
    show("Fuzzed bodies", {key: str(value) for key, value in bodies.items()})
    show("Fuzzed frames", {key: str(value) for key, value in frames.items()})
    save("front_fuzz", {"seed": args.seed, "bodies": bodies, "frames": frames})


async def measure_bodies(folder: Path, count: int, seed: int) -> dict[str, Any]:
    process = psutil.Process()
    with application(folder) as (app, answers):
        statuses = await fuzz_bodies(app, count // 5, seed)
        before = process.memory_info().rss
        statuses += await fuzz_bodies(app, count - count // 5, seed + 1)
        open_requests = answers.gauges["requests_running"] + answers.gauges["requests_waiting"]
        return {
            "count": count,
            "statuses": dict(sorted(statuses.items())),
            "open_requests_after": open_requests,
            "tasks_after": len(asyncio.all_tasks()) - 1,
            "grown_mib_after_first_fifth": round((process.memory_info().rss - before) / 2**20, 1),
        }


def measure_frames(folder: Path, count: int, seed: int) -> dict[str, Any]:
    path = write_config(folder / "c.toml", make_checkpoint(folder / "model"))
    config = load_config(path)
    script = saying("It is noon.", Tokenizer.load(config.model.path))
    with fake_worker(config, script), running(path, "front") as stack:
        process = psutil.Process(stack.processes["front"].pid)
        replies = fuzz_frames(config.endpoint("front"), count // 5, seed)
        before = process.memory_info().rss
        replies += fuzz_frames(config.endpoint("front"), count - count // 5, seed + 1)
        grown = process.memory_info().rss - before
        client = BlockingClient(config.endpoint("front"), make_identity("fuzz"))
        client.connect(10.0)
        answer = client.call(Chat('[{"role": "user", "content": "Hello"}]', 50), 10.0)
        client.close()
        assert isinstance(answer, TextChunk), answer
        assert answer.finish_reason == "stop"
        assert "Traceback" not in stack.log("front")
        return {
            "count": count,
            "replies": replies,
            "descriptors_after": process.num_fds(),
            "grown_mib_after_first_fifth": round(grown / 2**20, 1),
        }


if __name__ == "__main__":
    main()
