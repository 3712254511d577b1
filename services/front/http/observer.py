"""A look at all three services for whoever asks over HTTP, in a thread of its own that lives while somebody asks."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from shared.config import Config
from shared.observation.collector import Collector
from shared.observation.view import View
from shared.protocol.messages import StatsSnapshot

LISTEN_S = 0.3
# The first look lasts until every service has published twice, so that there are rates.
FIRST_LISTEN_S = 0.6
# After the last question.
LINGER_S = 30.0


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen in one moment, not much more than a second ago."""

    view: View
    snapshots: dict[str, StatsSnapshot]


class Observer:
    """Used by one event loop; leaving the block ends the thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._wanted_until = 0.0
        self._stop = threading.Event()
        self._seen = threading.Event()
        self._thread: threading.Thread | None = None
        self._look: Look | None = None

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    async def look(self) -> Look:
        """The present; the first question waits for it."""
        self._wanted_until = time.monotonic() + LINGER_S
        if self._thread is None or not self._thread.is_alive():
            self._seen.clear()
            self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
            self._thread.start()
        if not self._seen.is_set():
            await asyncio.to_thread(self._seen.wait)
        assert self._look is not None
        return self._look

    def _run(self) -> None:
        collector = Collector(self._config)
        try:
            collector.listen(FIRST_LISTEN_S)
            while True:
                self._look = Look(collector.view(), collector.latest())
                self._seen.set()
                if self._stop.is_set() or time.monotonic() > self._wanted_until:
                    return
                collector.listen(LISTEN_S)
        finally:
            collector.close()
