"""What a client hears while nothing is said, and when it is cut off."""

import asyncio
import socket

import pytest

from services.front.http import outlet
from services.front.http.outlet import tended
from services.front.http.server import SEND_BYTES, _bind

STALL_S = 0.3


class Client:
    """The other end: of what it was sent so many bytes are not taken, and while some are, nothing more goes out."""

    def __init__(self):
        self.body = b""
        self.unsent = 0
        self.is_cut_off = False

    @property
    def scope(self):
        return {"state": {"abort": self.cut_off, "unsent": lambda: self.unsent}}

    def cut_off(self):
        self.is_cut_off = True

    async def send(self, message):
        while self.unsent:
            await asyncio.sleep(0.001)
        self.body += message["body"]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(outlet, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(outlet, "STALL_S", STALL_S)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_silence_is_filled_with_comments():
    async def run():
        client = Client()
        async with tended(client.send, client.scope):
            await until(lambda: client.body.count(b": waiting\n\n") >= 3)

    asyncio.run(run())


@pytest.mark.parametrize("is_sending", [True, False])
def test_a_client_that_takes_nothing_is_cut_off(is_sending):
    async def run():
        client = Client()
        async with tended(client.send, client.scope) as out:
            client.unsent = 1000
            sending = asyncio.create_task(out.body(b"more")) if is_sending else None
            await until(lambda: client.is_cut_off)
            client.unsent = 0
            if sending:
                await sending
        assert client.body == (b"more" if is_sending else b"")

    asyncio.run(run())


def test_one_that_takes_little_is_not_until_it_stops():
    async def run():
        client = Client()
        async with tended(client.send, client.scope) as out:
            client.unsent = 1000
            sending = asyncio.create_task(out.body(b"more"))
            for _ in range(20):
                await asyncio.sleep(STALL_S / 15)
                client.unsent -= 1
                assert not client.is_cut_off
            await until(lambda: client.is_cut_off)
            client.unsent = 0
            await sending

    asyncio.run(run())


def test_an_application_without_a_connection_has_nothing_unsent():
    async def run():
        client = Client()
        async with tended(client.send, {}) as out:
            await out.body(b"a")
            await out.body(b"", more=False)
        assert client.body == b"a"

    asyncio.run(run())


def test_the_kernel_holds_little_of_what_a_client_does_not_read():
    with _bind("127.0.0.1", 0) as bound, socket.create_connection(bound.getsockname()):
        bound.setblocking(True)
        accepted, _ = bound.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BYTES
