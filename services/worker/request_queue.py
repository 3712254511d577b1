"""Requests that wait for the model, in the order in which they came.

The socket's thread puts, the model's thread takes. A request that was cancelled while it waited holds no place: it is
ended as soon as either thread looks at the queue.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from services.worker.engine import FinishReason, Job
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import TokensGenerated
from shared.transport.request import Request


@dataclass(slots=True)
class Ticket:
    """A request that waits or runs."""

    request: Request
    job: Job
    accepted: float = field(default_factory=time.perf_counter)

    def abort(self) -> None:
        """Send the final reply of a request that was cancelled before it ran."""
        elapsed = time.perf_counter() - self.accepted
        self.request.reply(
            TokensGenerated((), FinishReason.ABORT.value, len(self.job.prompt_ids), 0, 0, ttft_s=0.0, elapsed_s=elapsed)
        )


class RequestQueue:
    """At most `limit` tickets, first in, first out. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tickets: deque[Ticket] = deque()
        self._num_cancelled = 0
        self._changed = threading.Condition()

    @property
    def num_waiting(self) -> int:
        """Requests that wait and are still wanted."""
        with self._changed:
            return sum(not ticket.request.cancelled.is_set() for ticket in self._tickets)

    @property
    def num_cancelled(self) -> int:
        """Cumulative: requests that were cancelled while they waited."""
        return self._num_cancelled

    def put(self, ticket: Ticket) -> None:
        """Raises ServiceError (no_capacity) if `limit` requests wait already."""
        with self._changed:
            self._drop_cancelled()
            if len(self._tickets) >= self._limit:
                raise ServiceError(
                    ErrorCode.NO_CAPACITY, f"{self._limit} requests wait already (worker.max_queue); try again later"
                )
            self._tickets.append(ticket)
            self._changed.notify()

    def take(self, timeout_s: float) -> Ticket | None:
        """The first that is still wanted; None if none comes in time."""
        with self._changed:
            self._drop_cancelled()
            if not self._tickets:
                self._changed.wait(timeout_s)
            return self._tickets.popleft() if self._tickets else None

    def fail_all(self, code: ErrorCode, detail: str) -> int:
        """End all that wait with this error; how many they were."""
        with self._changed:
            self._drop_cancelled()
            failed = list(self._tickets)
            self._tickets.clear()
        for ticket in failed:
            ticket.request.fail(code, detail)
        return len(failed)

    def _drop_cancelled(self) -> None:
        for _ in range(len(self._tickets)):
            ticket = self._tickets.popleft()
            if ticket.request.cancelled.is_set():
                ticket.abort()
                self._num_cancelled += 1
            else:
                self._tickets.append(ticket)
