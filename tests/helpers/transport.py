"""Servers and peers for transport tests: a service whose behaviour each request chooses, and processes to kill."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from shared.errors import ErrorCode, ServiceError
from shared.protocol.codec import decode, encode
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    ExpertsFetched,
    FetchExperts,
    Generate,
    Hello,
    PrefetchHint,
    TokensGenerated,
)
from shared.runtime.boot import Identity, make_identity
from shared.transport.request import Request
from shared.transport.server import Server
from shared.transport.sockets import pack_id, unpack_id

ROOT = Path(__file__).resolve().parents[2]

# FetchExperts.layer chooses what the service does.
REPLY, RAISE, REFUSE, LATER, HOLD = range(5)


def fetch(behaviour: int, *ids: int) -> FetchExperts:
    return FetchExperts(behaviour, ids, 0)


def tokens(*ids: int, finish_reason: str = "") -> TokensGenerated:
    return TokensGenerated(ids, finish_reason, 1, len(ids), 0, 0.0, 0.0)


def generate(count: int) -> Generate:
    return Generate((1,), count)


def endless() -> Generate:
    """A stream that goes on until it is cancelled, at a pace that any reader can keep."""
    return Generate((1,), 10**9, temperature=0.0)


class Service:
    """A handler; held requests (HOLD, or 0 tokens) wait in `held`.

    `Generate` streams max_tokens tokens from another thread, as fast as it can, or every millisecond at temperature 0.
    """

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.held: list[Request] = []
        self.hints: list[PrefetchHint] = []
        self.lost: list[bytes] = []
        self.arrived = threading.Semaphore(0)
        self.someone_lost = threading.Event()

    def handle(self, request: Request) -> None:
        self.seen.append(request)
        try:
            self._act(request)
        finally:
            self.arrived.release()

    def on_peer_lost(self, peer: bytes) -> None:
        self.lost.append(peer)
        self.someone_lost.set()

    def _act(self, request: Request) -> None:
        match request.message:
            case PrefetchHint():
                self.hints.append(request.message)
            case Generate(max_tokens=0):
                self.held.append(request)
            case Generate():
                threading.Thread(target=self._stream, args=(request, request.message)).start()
            case FetchExperts(layer=0):
                request.reply(ExpertsFetched())
            case FetchExperts(layer=1):
                raise ZeroDivisionError("a bug in the handler")
            case FetchExperts(layer=2):
                raise ServiceError(ErrorCode.IO_ERROR, "the disk is on fire")
            case FetchExperts(layer=3):
                threading.Thread(target=request.reply, args=(ExpertsFetched(),)).start()
            case FetchExperts(layer=4):
                self.held.append(request)
            case other:
                raise ServiceError(ErrorCode.UNSUPPORTED, type(other).__name__)

    def _stream(self, request: Request, message: Generate) -> None:
        pause_s = 0.001 if message.temperature == 0 else 0.0
        for token in range(message.max_tokens):
            if request.cancelled.wait(pause_s):
                request.reply(tokens(finish_reason="abort"))
                return
            request.stream(tokens(token))
        request.reply(tokens(finish_reason="length"))


@contextmanager
def serving(
    endpoint: str, service: Service, identity: Identity | None = None, drain_s: float = 0.0
) -> Iterator[Server]:
    server = Server(endpoint, identity or make_identity("expertd"), service.handle, service.on_peer_lost)
    server.start()
    try:
        yield server
    finally:
        server.stop(drain_s)


class RawPeer:
    """A DEALER that sends whatever it is told to."""

    def __init__(self, endpoint: str, hello: bool = True) -> None:
        self._ids = itertools.count(1_000)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 5_000)
        self.socket.connect(endpoint)
        if hello:
            self.request(Hello(PROTOCOL_VERSION, "raw", "00"))

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request_id: int, msg: object) -> None:
        self.socket.send_multipart([pack_id(request_id), encode(msg)])

    def receive(self) -> tuple[int, object]:
        """The next message that is not a probe."""
        while True:
            id_frame, body = self.socket.recv_multipart()
            if body:
                return unpack_id(id_frame) or 0, decode(body)

    def request(self, msg: object) -> object:
        request_id = next(self._ids)
        self.send(request_id, msg)
        answered, reply = self.receive()
        assert answered == request_id
        return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Python code in a process of its own, which has printed its first line; killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline(), f"the process ended with {child.wait()}"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def hang(child: subprocess.Popen[str]) -> None:
    """Stop a child, as if it hung; returns when its last thread stands still."""
    child.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


SERVER_CODE = """
import sys, threading
sys.path.insert(0, "tests")
from helpers.transport import Service
from shared.runtime.boot import Identity
from shared.transport.server import Server
Server(sys.argv[1], Identity("expertd", sys.argv[2]), Service().handle).start()
print("up", flush=True)
threading.Event().wait()
"""

CLIENT_CODE = """
import sys, threading
sys.path.insert(0, "tests")
from helpers.transport import HOLD, fetch
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient
client = BlockingClient(sys.argv[1], make_identity("worker"))
client.connect(10.0)
for _ in range(int(sys.argv[2])):
    client.start(fetch(HOLD))
print("up", flush=True)
threading.Event().wait()
"""


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait for a condition that another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.001)
