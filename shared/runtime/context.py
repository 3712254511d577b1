"""What a service knows of its own life: its config and identity, its state, and whether it should stop.

Thread-safe. Signals, deadlines and exit codes are the business of shared.runtime.service.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from shared.config import Config
from shared.protocol.messages import Pong
from shared.readable import readable_bytes
from shared.runtime.boot import Identity
from shared.runtime.state import ServiceState

log = logging.getLogger(__name__)

# Progress comes once per tensor or shard; the log wants to know that it goes on.
PROGRESS_LOG_S = 1.0


class ServiceContext:
    """Handed to a service's main function. `stop` is for waiting on; ending the process is what returning is for."""

    def __init__(self, config: Config, identity: Identity) -> None:
        self.config = config
        self.identity = identity
        self.stop = threading.Event()
        self._started = time.monotonic()
        self._progress_logged = -PROGRESS_LOG_S
        self._lock = threading.Lock()
        self._state = ServiceState.STARTING
        self._detail = ""
        self._read = (0, 0)
        self._callbacks: list[Callable[[], None]] = []

    @property
    def stopping(self) -> bool:
        return self.stop.is_set()

    @property
    def failure_level(self) -> int:
        """The level at which to log that a peer went away or a request failed: expected once the service stops."""
        return logging.INFO if self.stopping else logging.WARNING

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until the service should stop, or the time is over; whether it should stop."""
        return self.stop.wait(timeout_s)

    def progress(self, text: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """The service is not ready (any more), and this is what it does or waits for; how far it is with reading."""
        self._enter(ServiceState.STARTING, text, done_bytes, total_bytes)

    def ready(self) -> None:
        """From now on requests are served."""
        self._enter(ServiceState.READY, "")

    def drain(self) -> None:
        """No new requests are served; for good."""
        self._enter(ServiceState.DRAINING, "")

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call this once, in another thread, when the service should stop; at once if that has happened."""
        with self._lock:
            if not self.stopping:
                self._callbacks.append(callback)
                return
        callback()

    def request_stop(self) -> None:
        """Drain, wake everything that waits for the stop. Not for signal handlers: it takes locks."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
            self.stop.set()
        self.drain()
        for callback in callbacks:
            callback()

    def pong(self) -> Pong:
        with self._lock:
            state, detail, read = self._state, self._detail, self._read
        uptime = time.monotonic() - self._started
        return Pong(self.identity.service, self.identity.boot_id, state.value, detail, os.getpid(), uptime, *read)

    def _enter(self, state: ServiceState, detail: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        now = time.monotonic()
        with self._lock:
            if self._state is ServiceState.DRAINING:
                return
            self._read = (done_bytes, total_bytes)
            if (self._state, self._detail) == (state, detail):
                return
            is_progress = state is self._state
            self._state, self._detail = state, detail
            if is_progress and now - self._progress_logged < PROGRESS_LOG_S:
                return
            self._progress_logged = now
        read = f" ({readable_bytes(done_bytes)} of {readable_bytes(total_bytes)})" if total_bytes else ""
        log.info("state=%s%s%s", state.value, f" {detail}" if detail else "", read)
