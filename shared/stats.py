"""Statistics on their way out: a service publishes cumulative counters and gauges, whoever is curious subscribes.

Publishing never waits for a subscriber, and a lost snapshot costs nothing, because the next one says it all again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from shared.errors import ProtocolError
from shared.protocol.codec import decode, encode
from shared.protocol.messages import StatsSnapshot
from shared.runtime.boot import Identity
from shared.transport.sockets import poll_ms, pub_socket, remove_socket_file, sub_socket

log = logging.getLogger(__name__)

INTERVAL_S = 0.25

# -> (values, labels); called in the publisher's thread
Collect = Callable[[], tuple[dict[str, float], dict[str, str]]]
# -> StatsSnapshot.picture; called in the publisher's thread
TakePicture = Callable[[], bytes]


class StatsPublisher:
    """Publishes what `collect` and `take_picture` return, every `interval_s`, in its own thread."""

    def __init__(
        self,
        endpoint: str,
        identity: Identity,
        collect: Collect,
        interval_s: float = INTERVAL_S,
        take_picture: TakePicture = bytes,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._collect = collect
        self._take_picture = take_picture
        self._interval_s = interval_s
        self._failure = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stats {endpoint}", daemon=True)

    def start(self) -> None:
        """Raises IceboxError if the address cannot be bound."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = pub_socket(self._context, self._endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._publish()
                self._stop.wait(self._interval_s)
        finally:
            self._context.destroy(linger=0)
            remove_socket_file(self._endpoint)

    def _publish(self) -> None:
        try:
            values, labels = self._collect()
            service, boot_id, picture = self._identity.service, self._identity.boot_id, self._take_picture()
            body = encode(StatsSnapshot(service, boot_id, time.time(), values, labels, picture))
        except Exception as error:  # a wrong number must not take the service down, but it is told, once
            if (failure := repr(error)) != self._failure:
                log.exception("statistics failed")
            self._failure = failure
        else:
            self._socket.send(body, zmq.NOBLOCK)


class StatsSubscriber:
    """Receives the snapshots of any number of services, whenever they start. Used by one thread."""

    def __init__(self, endpoints: Iterable[str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sub_socket(self._context, list(endpoints))

    def poll(self, timeout_s: float) -> StatsSnapshot | None:
        """The next snapshot, or None if none comes in time. Raises ProtocolError if what comes is none."""
        if not self._socket.poll(poll_ms(time.monotonic() + timeout_s)):
            return None
        snapshot = decode(self._socket.recv(zmq.NOBLOCK))
        if not isinstance(snapshot, StatsSnapshot):
            raise ProtocolError(f"{type(snapshot).__name__} on a stats socket")
        return snapshot

    def close(self) -> None:
        self._context.destroy(linger=0)
