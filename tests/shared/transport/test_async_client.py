"""The asyncio client, on the standard loop and on uvloop: the blocking client's contract, and streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from helpers.transport import (
    HOLD,
    LATER,
    REFUSE,
    REPLY,
    SERVER_CODE,
    Service,
    endless,
    fetch,
    generate,
    process,
    serving,
    tokens,
    until,
)

from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import ExpertsFetched, PrefetchHint
from shared.runtime.boot import Identity, make_identity
from shared.transport.client import AsyncClient, Take
from shared.transport.sockets import REQUEST_HWM

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, _no_leaks: None) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, 30.0))


@pytest.fixture(scope="module", autouse=True)
def _first_loop() -> None:
    """libuv keeps a few descriptors from the first loop of a process on."""
    uvloop.new_event_loop().close()


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(endpoint, make_identity("front"))
    await client.connect(10.0)
    try:
        yield client
    finally:
        client.close()


def into(got: list[object]) -> Take:
    """Takes whatever comes."""

    def take(reply: object) -> bool:
        got.append(reply)
        return True

    return take


async def collect(client: AsyncClient, count: int) -> list[object]:
    """A stream's replies."""
    got: list[object] = []
    await client.stream(generate(count), into(got))
    return got


def test_calls_and_their_errors(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            assert client.is_connected
            assert await client.call(fetch(LATER), 5.0) == ExpertsFetched()
            with pytest.raises(ServiceError, match="the disk is on fire") as caught:
                await client.call(fetch(REFUSE), 5.0)
            assert caught.value.code is ErrorCode.IO_ERROR
            client.send(PrefetchHint(3, (4,)))
            assert await client.call(generate(5), 5.0) == tokens(finish_reason="length")
        assert service.hints == [PrefetchHint(3, (4,))]

    run(scenario())


def test_many_calls_at_once_and_one_after_another(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            # Fewer than a socket holds: more would be refused, if nobody took the first of them meanwhile.
            replies = await asyncio.gather(*(client.call(fetch(i % 2 * LATER), 20.0) for i in range(REQUEST_HWM - 1)))
            assert replies == [ExpertsFetched()] * (REQUEST_HWM - 1)
            for _ in range(500):
                await client.call(fetch(REPLY), 5.0)

    run(scenario())


def test_streams_overlap_and_end_with_their_final_reply(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            for count, got in enumerate(await asyncio.gather(*(collect(client, n) for n in range(1, 20))), start=1):
                assert got == [*map(tokens, range(count)), tokens(finish_reason="length")]

    run(scenario())


def test_a_stream_that_fails_raises(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            with pytest.raises(ServiceError, match="the disk is on fire"):
                await client.stream(fetch(REFUSE), into([]))

    run(scenario())


def test_a_stream_of_which_enough_is_taken_ends_and_is_cancelled(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            got: list[object] = []

            def take(reply: object) -> bool:
                got.append(reply)
                return len(got) < 3

            await client.stream(endless(), take)
            assert got == [*map(tokens, range(3))]
            assert await asyncio.to_thread(service.seen[0].cancelled.wait, 5.0)
            assert await client.call(fetch(REPLY), 5.0) == ExpertsFetched()
            assert len(got) == 3

    run(scenario())


def test_what_taking_a_reply_raises_ends_its_stream_alone(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:

            def take(_: object) -> bool:
                raise ZeroDivisionError("no such token")

            failing, other = client.stream(endless(), take), collect(client, 50)
            failed, got = await asyncio.gather(failing, other, return_exceptions=True)
            assert isinstance(failed, ZeroDivisionError)
            assert got == [*map(tokens, range(50)), tokens(finish_reason="length")]
            assert await asyncio.to_thread(service.seen[0].cancelled.wait, 5.0)

    run(scenario())


def test_nothing_is_taken_after_the_task_was_cancelled(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            got: list[object] = []
            task = asyncio.create_task(client.stream(endless(), into(got)))
            while not got:
                await asyncio.sleep(0.001)
            task.cancel()
            count = len(got)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.seen[0].cancelled.wait, 5.0)
            assert len(got) == count

    run(scenario())


def test_cancelling_the_task_cancels_the_request(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            task = asyncio.create_task(client.call(fetch(HOLD), 60.0))
            while not service.held:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.held[0].cancelled.wait, 5.0)

    run(scenario())


def test_a_time_out_cancels_and_a_late_reply_is_dropped(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            with pytest.raises(ServiceError, match=r"FetchExperts within 0\.05 s") as caught:
                await client.call(fetch(HOLD), 0.05)
            assert caught.value.code is ErrorCode.TIMEOUT
            assert await asyncio.to_thread(service.held[0].cancelled.wait, 5.0)
            service.held[0].reply(ExpertsFetched())
            assert await client.call(fetch(REPLY), 5.0) == ExpertsFetched()

    run(scenario())


def test_a_finished_request_is_not_cancelled(run: Run, endpoint: str, service: Service) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as client:
            await client.call(fetch(REPLY), 5.0)
            await collect(client, 3)
            await client.call(fetch(REPLY), 5.0)
        assert not any(request.cancelled.is_set() for request in service.seen)

    run(scenario())


def test_connect_to_nobody_and_to_one_who_comes_later(run: Run, endpoint: str) -> None:
    async def scenario() -> None:
        client = AsyncClient(endpoint, make_identity("front"))
        with pytest.raises(PeerLost, match="not connected"):
            await client.call(fetch(REPLY), 5.0)
        with pytest.raises(PeerLost, match="does not answer"):
            await client.connect(0.1)
        assert not client.is_connected
        connecting = asyncio.create_task(client.connect(10.0))
        await asyncio.sleep(0)
        with serving(endpoint, Service(), Identity("worker", "b007")):
            assert (await connecting).boot_id == "b007"
            client.close()

    run(scenario())


def test_closing_while_connecting(run: Run, endpoint: str) -> None:
    async def scenario() -> None:
        client = AsyncClient(endpoint, make_identity("front"))
        connecting = asyncio.create_task(client.connect(0.2))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(PeerLost):
            await connecting
        client.close()

    run(scenario())


def test_a_killed_service_is_noticed_within_100_ms(run: Run, endpoint: str) -> None:
    async def scenario() -> None:
        with process(SERVER_CODE, endpoint, "first") as server:
            async with connected(endpoint) as client:
                calls = [asyncio.create_task(client.call(fetch(HOLD), 60.0)) for _ in range(3)]
                got: list[object] = []
                stream = asyncio.create_task(client.stream(endless(), into(got)))
                while not got:
                    await asyncio.sleep(0)
                assert not await client.is_lost_within(0.01)
                server.kill()
                killed = time.monotonic()
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(outcome, PeerLost) for outcome in outcomes)
                with pytest.raises(PeerLost, match="went away"):
                    await stream
                assert await client.is_lost_within(10.0)
                assert time.monotonic() - killed < 0.1
                assert not client.is_connected
                with pytest.raises(PeerLost, match="went away"):
                    await client.call(fetch(REPLY), 5.0)
                with pytest.raises(PeerLost, match="went away"):
                    client.send(PrefetchHint(0, ()))

    run(scenario())


def test_a_restart_shows_in_the_boot_id_and_nothing_is_sent_twice(run: Run, endpoint: str) -> None:
    second = Service()

    async def scenario() -> None:
        client = AsyncClient(endpoint, make_identity("front"))
        with process(SERVER_CODE, endpoint, "first") as server:
            assert (await client.connect(10.0)).boot_id == "first"
            before = asyncio.create_task(client.call(fetch(HOLD), 60.0))
            await asyncio.sleep(0)
            server.kill()
            server.wait()
        with serving(endpoint, second, Identity("worker", "second")):
            with pytest.raises(PeerLost):
                await client.call(fetch(REPLY), 5.0)
            with pytest.raises(PeerLost):
                await before
            assert (await client.connect(5.0)).boot_id == "second"
            assert await client.call(fetch(LATER), 5.0) == ExpertsFetched()
            client.close()

    run(scenario())
    assert [request.message for request in second.seen] == [fetch(LATER)]


def test_what_the_service_said_before_it_stopped_is_delivered(run: Run, endpoint: str) -> None:
    async def scenario() -> None:
        for _ in range(10):
            service = Service()
            with serving(endpoint, service) as server:
                async with connected(endpoint) as client:
                    calls = [asyncio.create_task(client.call(fetch(b), 5.0)) for b in [REPLY] * 20 + [HOLD]]
                    await asyncio.sleep(0)
                    until(lambda service=service: service.held)  # type: ignore[misc]
                    server.stop()
                    *answered, held = await asyncio.gather(*calls, return_exceptions=True)
                    assert answered == [ExpertsFetched()] * 20
                    assert isinstance(held, ServiceError)
                    assert held.code is ErrorCode.DRAINING

    run(scenario())
