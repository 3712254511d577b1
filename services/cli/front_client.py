"""The CLI's side of a chat: one connection to the front, and an ear for what expertd counts meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.cli.cache_report import CacheReport, cache_report
from shared.config import Config
from shared.errors import PeerLost
from shared.protocol.messages import Chat, ErrorReply, StatsSnapshot, TextChunk
from shared.runtime.boot import make_identity
from shared.stats import StatsSubscriber
from shared.transport.client import BlockingClient, service_error

CONNECT_S = 2.0
# How soon a wish to cancel is noticed.
POLL_S = 0.05
# Snapshots come every 0.25 s while expertd lives, and expertd reads the worker's use counts every 20 ms.
SNAPSHOT_S = 0.6
SETTLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of an answer, and what the cache did for it (None if expertd could not be heard)."""

    last: TextChunk
    cache: CacheReport | None


class FrontClient:
    """Asks the front, one question at a time. Used by one thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._client = BlockingClient(config.endpoint("front"), make_identity("cli"))
        self._stats = StatsEar(config.endpoint("expertd.stats"))

    def connect(self) -> None:
        """Raises PeerLost, with advice, if the front does not answer."""
        try:
            self._client.connect(CONNECT_S)
        except PeerLost:
            raise PeerLost(
                f"the front does not answer in {self._config.run_dir}; `icebox up` starts the services, "
                f"`icebox status` says what they do"
            ) from None

    def ask(self, chat: Chat, on_chunk: Callable[[TextChunk], None], cancelled: Callable[[], bool]) -> Reply:
        """Stream an answer, the final chunk included; once `cancelled` says so the answer ends early.

        Raises:
            ServiceError: the front refused, or the answer failed.
            PeerLost: the front went away.
        """
        before = self._stats.last or self._stats.fresh()
        request_id = self._client.start(chat)
        last = self._follow(request_id, on_chunk, cancelled)
        return Reply(last, cache_report(before, self._stats.fresh() if before else None))

    def _follow(
        self, request_id: int, on_chunk: Callable[[TextChunk], None], cancelled: Callable[[], bool]
    ) -> TextChunk:
        has_cancelled = False
        while True:
            if not has_cancelled and cancelled():
                has_cancelled = True
                self._client.cancel(request_id)
            event = self._client.poll(POLL_S)
            if event is None:
                continue
            if isinstance(event[1], ErrorReply):
                raise service_error(event[1])
            assert isinstance(event[1], TextChunk)
            on_chunk(event[1])
            if event[1].finish_reason:
                return event[1]

    def close(self) -> None:
        self._client.close()
        self._stats.close()


class StatsEar:
    """Keeps the `last` snapshot of a service, in a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._news = threading.Condition()
        self.last: StatsSnapshot | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="stats", daemon=True)
        self._thread.start()

    def fresh(self) -> StatsSnapshot | None:
        """A snapshot in which everything until this call is counted; None if none comes."""
        settled = time.time() + SETTLE_S

        def is_fresh() -> bool:
            return self.last is not None and self.last.time_s >= settled

        with self._news:
            return self.last if self._news.wait_for(is_fresh, SNAPSHOT_S) else None

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _listen(self) -> None:
        subscriber = StatsSubscriber([self._endpoint])
        try:
            while not self._closing:
                snapshot = subscriber.poll(POLL_S)
                if snapshot is not None:
                    with self._news:
                        self.last = snapshot
                        self._news.notify_all()
        finally:
            subscriber.close()
