"""The only place that makes sockets: kinds, limits and time-outs in one view. Knows no message.

Every peer owns its zmq context, so closing a peer leaves no thread or descriptor behind.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from collections.abc import Iterable, Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.errors import IceboxError

# Messages queued per peer inside zmq. The real limits are the applications'; these keep memory bounded.
REQUEST_HWM = 256
STATS_HWM = 16
# More than any message of ours: the ids of a prompt of a million tokens need 5 MB.
MAX_MESSAGE_BYTES = 64 << 20
# Last replies have this long to leave; a service has 3 s to stop.
SERVER_LINGER_MS = 200
# Subscribers look for a service that has not started yet this often; others do not, within the life of a connection.
RECONNECT_MS = 50
NEVER_MS = 3_600_000

ONE_WAY_ID = 0
_INPUT = int(zmq.POLLIN)
_ID = struct.Struct("<Q")

# Events of a socket's monitor.
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
DISCONNECTED = zmq.EVENT_DISCONNECTED
NOT_CONNECTED = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def router_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A bound server socket. Sending to a peer that is gone is an error here, not silence."""
    socket = _make(context, zmq.ROUTER, REQUEST_HWM, SERVER_LINGER_MS)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _bind(socket, endpoint)
    return socket


def dealer_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A client socket, to be connected once its monitor listens. It never reconnects by itself.

    zmq would otherwise hand what was meant for a dead peer to its successor. (Its own ways to forbid that, IMMEDIATE
    and a negative RECONNECT_IVL, also throw away what the dead peer had said and nobody has read yet.)
    """
    socket = _make(context, zmq.DEALER, REQUEST_HWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    return socket


def pub_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = _make(context, zmq.PUB, STATS_HWM, 0)
    _bind(socket, endpoint)
    return socket


def sub_socket(context: zmq.Context[zmq.Socket[bytes]], endpoints: Iterable[str]) -> zmq.Socket[bytes]:
    """Connected to every endpoint, those that nobody has bound yet included."""
    socket = _make(context, zmq.SUB, STATS_HWM, 0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    for endpoint in endpoints:
        socket.connect(endpoint)
    return socket


def monitor_socket(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Receives CONNECTED, DISCONNECTED and NOT_CONNECTED of `socket`; must be made before it connects."""
    monitor = socket.get_monitor_socket(CONNECTED | DISCONNECTED | NOT_CONNECTED)
    monitor.setsockopt(zmq.LINGER, 0)
    return monitor


def monitor_events(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """What has happened since the last call; never blocks."""
    while has_input(monitor):
        yield recv_monitor_message(monitor, zmq.NOBLOCK)["event"]


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received: for a fraction of the price of the exception that says that none can."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _INPUT)


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """The descriptor that becomes readable when something about `socket` changes."""
    return int(socket.getsockopt(zmq.FD))


def poll_ms(deadline: float) -> int:
    """What is left until a time.monotonic() deadline, as zmq wants it: whole milliseconds, rounded up."""
    return max(0, math.ceil(1000 * (deadline - time.monotonic())))


def pack_id(request_id: int) -> bytes:
    return _ID.pack(request_id)


def unpack_id(frame: bytes) -> int | None:
    """The request id in a frame; None if it is none."""
    return _ID.unpack(frame)[0] if len(frame) == _ID.size else None


def remove_socket_file(endpoint: str) -> None:
    """zmq leaves the file of an ipc address behind; only the owner of the run directory's lock may call this."""
    if endpoint.startswith("ipc://"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(endpoint.removeprefix("ipc://"))


def _make(context: zmq.Context[zmq.Socket[bytes]], kind: int, hwm: int, linger_ms: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise IceboxError(f"cannot listen at {endpoint}: {error.strerror}") from error
