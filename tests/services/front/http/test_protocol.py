"""Connections that say too little, too slowly or too much, against the real server with a small application."""

import asyncio
import contextlib
import json

import pytest
import uvicorn
import uvloop

from services.front.http import protocol
from services.front.http.protocol import LimitedProtocol
from services.front.http.server import _bind

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def application(scope, receive, send):
    assert callable(scope["state"]["abort"])
    assert scope["state"]["unsent"]() == 0
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(keep_alive_s=30, app=application):
    """The port of a server in this loop."""
    bound = _bind("127.0.0.1", 0)
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        loop="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([bound]))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        assert not server.server_state.connections


async def hang_up(writer):
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def talk(scenario, **options):
    """Run `scenario(connect)` with a server."""

    async def run():
        async with serving(**options) as port, contextlib.AsyncExitStack() as stack:

            async def connect():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.push_async_callback(hang_up, writer)
                return reader, writer

            async with asyncio.timeout(10):
                return await scenario(connect)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def status_of(answer):
    """The status of a refusal, whose body is an error object."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["message"]
    assert b"connection: close" in head
    return int(head.split()[1])


@pytest.mark.parametrize("said", [b"", REQUEST[:20], b"\r\n"])
def test_a_head_that_does_not_come_is_408(monkeypatch, said):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)

    async def scenario(connect):
        reader, writer = await connect()
        writer.write(said)
        return await reader.read()

    assert status_of(talk(scenario)) == 408


def test_so_it_is_after_an_answer(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)

    async def scenario(connect):
        reader, writer = await connect()
        writer.write(REQUEST)
        await reader.readuntil(b"ok")
        writer.write(REQUEST[:20])
        return await reader.read()

    assert status_of(talk(scenario)) == 408


def test_a_request_in_time_is_not_disturbed(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)

    async def scenario(connect):
        reader, writer = await connect()
        for _ in range(4):
            writer.write(REQUEST)
            await reader.readuntil(b"ok")
            await asyncio.sleep(0.1)
        return True

    assert talk(scenario)


def test_an_idle_connection_is_closed():
    async def scenario(connect):
        reader, writer = await connect()
        writer.write(REQUEST)
        return await reader.read()

    assert talk(scenario, keep_alive_s=0.05).endswith(b"ok")


def test_a_head_without_end_is_431():
    async def scenario(connect):
        reader, writer = await connect()
        headers = "".join(f"x-{i}: {'y' * 1000}\r\n" for i in range(66))
        writer.write(REQUEST[:-2] + headers.encode())
        return await reader.read()

    assert status_of(talk(scenario)) == 431


def test_what_is_no_http_is_400():
    async def scenario(connect):
        reader, writer = await connect()
        writer.write(b"\x16\x03\x01\x00\xff")
        return await reader.read()

    assert status_of(talk(scenario)) == 400


POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n"


def test_the_rest_of_a_body_after_its_answer_is_no_head(monkeypatch):
    """Neither too slow nor too long for one, and the connection goes on."""
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)

    async def scenario(connect):
        reader, writer = await connect()
        writer.write(POST)
        await reader.readuntil(b"ok")
        for _ in range(4):
            writer.write(b"x" * 50_000)
            await asyncio.sleep(0.1)
        writer.write(REQUEST)
        return await reader.readuntil(b"ok")

    assert talk(scenario).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("rest", "rest_timeout_s", "keep_alive_s"), [(1000, 0.05, 30), (200_000, 30, 0.05)])
def test_a_rest_that_does_not_end_is_closed_and_so_is_silence_after_it(monkeypatch, rest, rest_timeout_s, keep_alive_s):
    monkeypatch.setattr(protocol, "REST_TIMEOUT_S", rest_timeout_s)

    async def scenario(connect):
        reader, writer = await connect()
        writer.write(POST)
        await reader.readuntil(b"ok")
        writer.write(b"x" * rest)
        return await reader.read()

    assert talk(scenario, keep_alive_s=keep_alive_s) == b""


@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_a_client_that_leaves_is_missed_whatever_else_it_has_asked(num_requests):
    has_begun, is_missed = asyncio.Event(), asyncio.Event()

    async def waiting(scope, receive, send):
        has_begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        is_missed.set()

    async def scenario(connect):
        _, writer = await connect()
        writer.write(REQUEST)
        await has_begun.wait()
        writer.write(REQUEST * (num_requests - 1))
        await asyncio.sleep(0.05)
        await hang_up(writer)
        await is_missed.wait()

    talk(scenario, app=waiting)


def test_a_request_before_the_last_answer_is_dropped_and_the_connection_closed_after_it():
    """So is its body, which is not the first one's."""
    go, bodies = asyncio.Event(), []

    async def slow(scope, receive, send):
        await go.wait()
        bodies.append((await receive())["body"])
        await application(scope, receive, send)

    async def scenario(connect):
        reader, writer = await connect()
        post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n"
        writer.write(post + b"a" + post + b"b")
        await asyncio.sleep(0.05)
        writer.write(post + b"c")
        go.set()
        return await reader.read()

    assert talk(scenario, app=slow).count(b"HTTP/1.1") == 1
    assert bodies == [b"a"]


def test_too_many_connections_are_503_and_leave_room_again(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 2)

    async def scenario(connect):
        first, second, third = [await connect() for _ in range(3)]
        refusal = await third[0].read()
        first[1].close()
        while True:
            reader, writer = await connect()
            writer.write(REQUEST)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readuntil(b"ok")
                break
        second[1].write(REQUEST)
        await second[0].readuntil(b"ok")
        return refusal

    assert status_of(talk(scenario)) == 503
