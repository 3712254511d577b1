"""Statistics: snapshots say everything again, nobody is waited for, and readers may come and go."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shared.errors import IceboxError, ProtocolError
from shared.protocol.codec import encode
from shared.protocol.messages import Ping, StatsSnapshot
from shared.runtime.boot import Identity
from shared.stats import StatsPublisher, StatsSubscriber

IDENTITY = Identity("expertd", "b007")


class Counters:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> tuple[dict[str, float], dict[str, str]]:
        self.asked += 1
        return {"asked": self.asked}, {"policy": "lfu"}


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/x.stats"


@pytest.fixture
def publisher(endpoint: str) -> Iterator[StatsPublisher]:
    publisher = StatsPublisher(endpoint, IDENTITY, Counters().collect, 0.002)
    publisher.start()
    yield publisher
    publisher.stop()


def next_snapshot(subscriber: StatsSubscriber) -> StatsSnapshot:
    snapshot = subscriber.poll(5.0)
    assert snapshot is not None
    return snapshot


def test_snapshots_arrive_in_order_and_are_cumulative(endpoint: str, publisher: StatsPublisher) -> None:
    subscriber = StatsSubscriber([endpoint])
    snapshots = [next_snapshot(subscriber) for _ in range(10)]
    counts = [snapshot.values["asked"] for snapshot in snapshots]
    assert counts == sorted(set(counts))
    assert {(s.service, s.boot_id, s.labels["policy"]) for s in snapshots} == {("expertd", "b007", "lfu")}
    assert snapshots[0].time_s < snapshots[-1].time_s
    subscriber.close()


def test_a_subscriber_that_is_first_waits(endpoint: str) -> None:
    subscriber = StatsSubscriber([endpoint, f"{endpoint}.never"])
    assert subscriber.poll(0.0) is None
    publisher = StatsPublisher(endpoint, IDENTITY, Counters().collect, 0.002)
    publisher.start()
    assert next_snapshot(subscriber).values["asked"] >= 1
    publisher.stop()
    subscriber.close()


def test_a_reader_that_sleeps_loses_snapshots_and_delays_nobody(endpoint: str) -> None:
    counters = Counters()
    enough = threading.Event()

    def collect() -> tuple[dict[str, float], dict[str, str]]:
        if counters.asked >= 3000:
            enough.set()
        values, _ = counters.collect()
        return values, {"padding": "x" * 4000}

    publisher = StatsPublisher(endpoint, IDENTITY, collect, 0.0)
    sleeper, reader = StatsSubscriber([endpoint]), StatsSubscriber([endpoint])
    publisher.start()
    next_snapshot(sleeper)
    assert enough.wait(30.0)
    while next_snapshot(reader).values["asked"] < 3000:
        pass
    received = sum(1 for _ in iter(lambda: sleeper.poll(0.0), None))
    assert received < 3000
    publisher.stop()
    for subscriber in (sleeper, reader):
        subscriber.close()


def test_one_subscriber_many_services_and_a_restart(tmp_path: Path) -> None:
    endpoints = [f"ipc://{tmp_path}/{name}.stats" for name in ("a", "b")]
    subscriber = StatsSubscriber(endpoints)
    for boot_id in ("1", "2"):
        publishers = [
            StatsPublisher(endpoint, Identity(name, boot_id), Counters().collect, 0.002)
            for endpoint, name in zip(endpoints, "ab", strict=True)
        ]
        for publisher in publishers:
            publisher.start()
        wanted = {("a", boot_id), ("b", boot_id)}
        while wanted:
            snapshot = next_snapshot(subscriber)
            wanted.discard((snapshot.service, snapshot.boot_id))
        for publisher in publishers:
            publisher.stop()
    subscriber.close()


def test_a_collector_that_fails_is_told_once_and_tried_again(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    calls = itertools.count()

    def collect() -> tuple[dict[str, float], dict[str, str]]:
        if (call := next(calls)) < 5:
            raise ZeroDivisionError("no uses yet")
        return {"asked": call}, {}

    publisher = StatsPublisher(endpoint, IDENTITY, collect, 0.002)
    subscriber = StatsSubscriber([endpoint])
    with caplog.at_level(logging.ERROR):
        publisher.start()
        assert next_snapshot(subscriber).values["asked"] >= 5
    publisher.stop()
    subscriber.close()
    assert caplog.text.count("ZeroDivisionError: no uses yet") == 1


def test_something_else_on_a_stats_socket_is_refused(endpoint: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.XPUB)
    stranger.bind(endpoint)
    subscriber = StatsSubscriber([endpoint])
    stranger.recv()
    for body in (b"garbage", encode(Ping())):
        stranger.send(body)
        with pytest.raises(ProtocolError):
            subscriber.poll(5.0)
    subscriber.close()
    context.destroy(linger=0)


def test_stop_removes_the_socket_file_and_may_be_repeated(endpoint: str, publisher: StatsPublisher) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    assert path.exists()
    publisher.stop()
    publisher.stop()
    assert not path.exists()


def test_a_picture_goes_along_and_none_is_empty(endpoint: str, tmp_path: Path) -> None:
    pictured = f"ipc://{tmp_path}/y.stats"
    publishers = [
        StatsPublisher(endpoint, IDENTITY, Counters().collect, 0.002),
        StatsPublisher(pictured, IDENTITY, Counters().collect, 0.002, lambda: b"\x80\x01"),
    ]
    for publisher, address, picture in zip(publishers, (endpoint, pictured), (b"", b"\x80\x01"), strict=True):
        publisher.start()
        subscriber = StatsSubscriber([address])
        assert next_snapshot(subscriber).picture == picture
        subscriber.close()
        publisher.stop()


def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    publisher = StatsPublisher(f"ipc://{tmp_path}/missing/x.stats", IDENTITY, Counters().collect)
    with pytest.raises(IceboxError, match=r"missing/x\.stats"):
        publisher.start()
    publisher.stop()
