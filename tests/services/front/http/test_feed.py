"""The feed of the cache: what an event says, and that watchers come, go and are limited."""

import asyncio
import base64
import json
from types import SimpleNamespace

import pytest

from services.front.http import feed as feed_module
from services.front.http import outlet
from services.front.http.feed import Feed, payload, routes
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import StatsSnapshot


def snapshot(time_s=1.0, **values):
    return StatsSnapshot("expertd", "b", time_s, values, {"policy": "lfu"}, b"\x80\x00\x7f")


def test_an_event_has_everything_but_single_layers():
    event = payload(snapshot(2.5, **{"misses": 3.0, "misses.0": 1.0}))
    assert event == {
        "boot_id": "b",
        "time_s": 2.5,
        "values": {"misses": 3.0},
        "labels": {"policy": "lfu"},
        "picture": base64.b64encode(b"\x80\x00\x7f").decode(),
    }


class Front:
    """An observer whose snapshots are the test's."""

    def __init__(self):
        self.answers = SimpleNamespace(is_stopping=False)
        self.observer = self
        self.seen = {}

    async def look(self):
        return SimpleNamespace(snapshots=self.seen)


@pytest.fixture
def front(monkeypatch):
    monkeypatch.setattr(feed_module, "LOOK_S", 0.001)
    return Front()


async def next_event(stream):
    while True:
        frame = await anext(stream)
        if frame.startswith(b"data:"):
            return json.loads(frame.removeprefix(b"data: "))


def test_each_snapshot_comes_once_and_the_newest_to_whoever_begins(front):
    async def scenario():
        feed = Feed(front)
        first = feed.watch()
        front.seen["expertd"] = snapshot(1.0)
        assert (await next_event(first))["time_s"] == 1.0
        waiting = asyncio.create_task(next_event(first))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        front.seen["expertd"] = snapshot(2.0)
        assert (await waiting)["time_s"] == 2.0
        assert (await next_event(feed.watch()))["time_s"] == 2.0

    asyncio.run(scenario())


def test_a_silent_expertd_is_told_and_a_stopping_front_ends_the_stream(front):
    async def scenario():
        stream = Feed(front).watch()
        assert await anext(stream) == b": watching\n\n"
        assert await anext(stream) == b": expertd is silent\n\n"
        front.answers.is_stopping = True
        assert [frame async for frame in stream] == []

    asyncio.run(scenario())


def test_a_watcher_that_takes_nothing_is_cut_off(front, monkeypatch):
    monkeypatch.setattr(outlet, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(outlet, "STALL_S", 0.05)

    async def scenario():
        is_cut_off = asyncio.Event()

        async def wait(*_):
            await is_cut_off.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "GET", "path": "/cache", "headers": [], "state": {"abort": is_cut_off.set}}
        (route,) = routes(front)
        async with asyncio.timeout(10):
            await route.handle(scope, wait, wait)

    asyncio.run(scenario())


def test_watchers_are_limited_and_make_room_when_they_go(front, monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_WATCHERS", 2)

    async def scenario():
        feed = Feed(front)
        streams = [feed.watch(), feed.watch()]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ServiceError) as refusal:
            feed.watch()
        assert refusal.value.code is ErrorCode.NO_CAPACITY
        await streams[0].aclose()
        await anext(feed.watch())

    asyncio.run(scenario())
