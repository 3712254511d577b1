"""Listens to the services: subscribes to their statistics and pings them, and does nothing else to them."""

from __future__ import annotations

import time
from collections import deque

from shared.config import Config
from shared.errors import ProtocolError, ServiceError
from shared.observation.view import View, Window, make_view
from shared.protocol.messages import Pong, StatsSnapshot
from shared.stats import StatsSubscriber
from shared.transport.control import ping

SERVICES = ("expertd", "worker", "front")
PING_INTERVAL_S = 1.0
PING_S = 0.3
# "Now" is this long; a service that has not spoken for as long is not heard any more.
WINDOW_S = 2.0


class Collector:
    """What was heard lately. Used by one thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._subscriber = StatsSubscriber(config.endpoint(f"{name}.stats") for name in SERVICES)
        self._heard: dict[str, deque[tuple[float, StatsSnapshot]]] = {name: deque() for name in SERVICES}
        self._pongs: dict[str, Pong | None] = dict.fromkeys(SERVICES)
        self._pinged = -PING_INTERVAL_S

    def listen(self, seconds: float) -> None:
        """Take in what the services say for this long."""
        if time.monotonic() - self._pinged >= PING_INTERVAL_S:
            self._pongs = {name: self._ping(name) for name in SERVICES}
            self._pinged = time.monotonic()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                snapshot = self._subscriber.poll(left)
            except ProtocolError:
                continue  # another version's snapshot: its ping says more
            if snapshot is not None and snapshot.service in self._heard:
                self._heard[snapshot.service].append((time.monotonic(), snapshot))

    def view(self) -> View:
        """The present, from what was heard in the last `WINDOW_S` seconds."""
        horizon = time.monotonic() - WINDOW_S
        windows = {}
        for name, heard in self._heard.items():
            while heard and heard[0][0] < horizon:
                heard.popleft()
            if heard:
                windows[name] = Window(heard[0][1] if len(heard) > 1 else None, heard[-1][1])
        return make_view(self._pongs, windows)

    def latest(self) -> dict[str, StatsSnapshot]:
        """The last snapshot of each service that was heard in the last `WINDOW_S` seconds."""
        horizon = time.monotonic() - WINDOW_S
        return {name: heard[-1][1] for name, heard in self._heard.items() if heard and heard[-1][0] >= horizon}

    def close(self) -> None:
        self._subscriber.close()

    def _ping(self, name: str) -> Pong | None:
        try:
            return ping(self._config, name, PING_S)
        except ServiceError as error:
            return Pong(name, "", "unknown", error.detail, 0, 0.0)
