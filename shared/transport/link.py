"""What both clients share: one connection to one server that never blocks and knows when it is lost.

Replies that arrived before a disconnect are delivered before the loss is reported. Waiting is the clients' business.
"""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from shared.errors import ErrorCode, PeerLost, ProtocolError, ServiceError
from shared.protocol.codec import decode, encode
from shared.protocol.messages import ErrorReply
from shared.transport.sockets import (
    CONNECTED,
    DISCONNECTED,
    NOT_CONNECTED,
    dealer_socket,
    has_input,
    monitor_events,
    monitor_socket,
    pack_id,
    unpack_id,
)


class Link:
    """It never reconnects by itself: after a loss the owner makes a new Link, so no request is sent twice.

    `socket` and `monitor` are for polling only.
    """

    __slots__ = ("_context", "endpoint", "is_connected", "is_lost", "monitor", "socket")

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.is_connected = False
        self.is_lost = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = dealer_socket(self._context)
        self.monitor = monitor_socket(self.socket)
        self.socket.connect(endpoint)

    def close(self) -> None:
        """Drop the connection and what was not sent yet. Idempotent."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._context.destroy(linger=0)
        self.is_lost = True

    def send(self, request_id: int, msg: object) -> None:
        """Raises PeerLost if there is no connection, ServiceError(no_capacity) if the peer does not read."""
        body = encode(msg)
        if self.is_lost:
            raise self.lost()
        try:
            self.socket.send_multipart((pack_id(request_id), body), zmq.NOBLOCK)
        except zmq.Again:
            if self.update():
                raise self.lost() from None
            raise ServiceError(ErrorCode.NO_CAPACITY, f"the service at {self.endpoint} does not read") from None

    def receive(self) -> Iterator[tuple[int, object]]:
        """The replies that have arrived, as (request id, message)."""
        while not self.socket.closed and has_input(self.socket):
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            yield unpack_id(frames[0]) or 0, _decoded(frames)

    def update(self) -> bool:
        """Take note of connection and loss; True if there is no peer (any more). `receive` still gives what arrived."""
        for event in monitor_events(self.monitor) if not self.socket.closed else ():
            if event == CONNECTED:
                self.is_connected = True
            elif event & (DISCONNECTED | NOT_CONNECTED):
                self.is_lost = True
        return self.is_lost

    def lost(self) -> PeerLost:
        what = "went away" if self.is_connected else "does not answer; is it running?"
        return PeerLost(f"the service at {self.endpoint} {what}")


def _decoded(frames: list[bytes]) -> object:
    if len(frames) == 2 and not frames[1]:
        return None  # a probe: the server wanted to know whether we are here
    try:
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames instead of 2")
        return decode(frames[1])
    except ProtocolError as error:
        return ErrorReply(ErrorCode.BAD_MESSAGE.value, f"the service sent what is no message: {error}")
