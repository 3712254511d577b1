"""Asking a worker whose queue is full: seldom, and in the order in which the requests came."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from unittest.mock import MagicMock

import pytest

from services.front import worker_link
from services.front.worker_link import FULL_RETRY_S, LONGEST_FULL_RETRY_S, WorkerLink
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import Generate, TokensGenerated

ANSWER = TokensGenerated((), "stop", 1, 0, 0, 0.0, 0.0)


class FullWorker:
    """In place of the connection: refuses every request until it has `room`, and then answers when it is `done`."""

    is_connected = True

    def __init__(self) -> None:
        self.room = self.num_asked = 0
        self.taken: list[int] = []
        self.delays: list[float] = []
        self.done = asyncio.Event()

    async def stream(self, request: Generate, take) -> None:
        self.num_asked += 1
        if len(self.taken) == self.room:
            raise ServiceError(ErrorCode.NO_CAPACITY, "full")
        self.taken.append(request.prompt_ids[0])
        await self.done.wait()
        take(ANSWER)

    async def is_lost_within(self, seconds: float) -> bool:
        """No time passes, but everybody else has a turn."""
        self.delays.append(seconds)
        await asyncio.sleep(0)
        return False


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "TAKEN_S", 0.001)


def linked(worker: FullWorker) -> WorkerLink:
    link = WorkerLink(MagicMock())
    link._client = worker  # type: ignore[assignment]
    return link


def asking(link: WorkerLink, number: int) -> asyncio.Task[None]:
    return asyncio.create_task(link.generate(Generate((number,), 1), lambda _: True))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_full_worker_is_asked_less_and_less_often() -> None:
    async def run() -> list[float]:
        worker = FullWorker()
        requests = [asking(linked(worker), 0)]
        while len(worker.delays) < 12:
            await asyncio.sleep(0)
        requests[0].cancel()
        await asyncio.wait(requests)
        return worker.delays

    delays = asyncio.run(run())
    assert delays[0] == FULL_RETRY_S
    assert all(later == min(2 * earlier, LONGEST_FULL_RETRY_S) for earlier, later in pairwise(delays))
    assert delays[-1] == LONGEST_FULL_RETRY_S


def test_only_one_asks_again() -> None:
    """The others were refused once."""

    async def run() -> tuple[int, int]:
        """How many began to ask again, and how often the worker was asked after the first time."""
        worker = FullWorker()
        link = linked(worker)
        requests = [asking(link, number) for number in range(8)]
        await turns(200)
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
        return worker.delays.count(FULL_RETRY_S), worker.num_asked - len(requests)

    num_retriers, num_retries = asyncio.run(run())
    assert num_retriers == 1
    assert num_retries > 1


def test_who_came_first_is_taken_first() -> None:
    """Also before those who come when there is room again."""

    async def run() -> list[int]:
        worker = FullWorker()
        link = linked(worker)
        requests = [asking(link, number) for number in range(4)]
        await turns(50)
        worker.room = 6
        requests += [asking(link, number) for number in (4, 5)]
        while len(worker.taken) < 6:
            await asyncio.sleep(0.001)
        worker.done.set()
        await asyncio.gather(*requests)
        return worker.taken

    assert asyncio.run(run()) == list(range(6))


def test_who_leaves_the_line_lets_the_next_ask() -> None:
    async def run() -> list[int]:
        worker = FullWorker()
        link = linked(worker)
        requests = [asking(link, number) for number in range(3)]
        await turns(50)
        for request in requests[:2]:
            request.cancel()
        await asyncio.wait(requests[:2])
        worker.room = 1
        worker.done.set()
        await requests[2]
        return worker.taken

    assert asyncio.run(run()) == [2]


@pytest.mark.parametrize("taken_s", [0.001, 60.0])
def test_who_leaves_while_the_worker_is_asked_again_is_cancelled_there(
    taken_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "TAKEN_S", taken_s)

    async def run() -> bool:
        worker = FullWorker()
        ended = asyncio.Event()

        async def stream(request: Generate, take) -> None:
            try:
                await worker.done.wait()
            finally:
                ended.set()

        request = asking(linked(worker), 0)
        await turns(20)
        worker.stream = stream  # type: ignore[method-assign]
        await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.wait([request])
        await turns(5)
        return ended.is_set()

    assert asyncio.run(run())
