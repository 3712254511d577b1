"""The serving side of a socket: one thread that owns it, any number of peers, exactly one final reply per request.

Answers Hello, Ping and Cancel itself and gives everything else to the service's handler, which must hand the work
over and return. Knows nothing of what the messages are about.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from shared.errors import ErrorCode, ProtocolError, ServiceError
from shared.protocol.codec import decode, encode, spec_of
from shared.protocol.messages import PROTOCOL_VERSION, Cancel, ErrorReply, Hello, Ping, Pong, Welcome
from shared.runtime.boot import Identity
from shared.runtime.state import ServiceState
from shared.transport.request import Request
from shared.transport.sockets import (
    ONE_WAY_ID,
    has_input,
    monitor_events,
    monitor_socket,
    pack_id,
    poll_ms,
    remove_socket_file,
    router_socket,
    unpack_id,
)

log = logging.getLogger(__name__)

MAX_OPEN_REQUESTS = 1024
# Replies that wait, for one peer to read or for all to be sent, before streams are ended.
MAX_BACKLOG = 4096
# Messages taken, and replies sent, in one go: neither a flood of requests nor a fast stream keeps the rest waiting.
RECEIVE_BURST = 64
SEND_BURST = 256
RETRY_S = 0.005
# At stop, so long for peers that read to take their last replies; then SERVER_LINGER_MS for what zmq has taken.
FLUSH_S = 0.2
FLUSH_RETRY_S = 0.0005
# A monitor says that somebody left, not who: every peer is then probed. zmq forgets the peer a moment after the event.
PROBE_DELAYS_S = (0.0, 0.002, 0.01, 0.05)

Handler = Callable[[Request], None]
Status = Callable[[], Pong]


@dataclass(slots=True)
class _Peer:
    """A connection: who said Hello on it, and the replies that it has not taken yet."""

    role: str
    backlog: deque[tuple[bytes, bytes]] = field(default_factory=deque)


class Server:
    """A ROUTER in its own thread.

    `handle` is called in that thread; what it raises becomes the final reply (a ServiceError keeps its code).
    `on_peer_lost` is told, in that thread, of every peer that said Hello and went away; its requests are cancelled.
    `status` answers Ping; without it the service is simply "ready".
    """

    def __init__(
        self,
        endpoint: str,
        identity: Identity,
        handle: Handler,
        on_peer_lost: Callable[[bytes], None] | None = None,
        status: Status | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._handle = handle
        self._on_peer_lost = on_peer_lost
        self._status = status or self._ready
        self._started = time.monotonic()
        self._peers: dict[bytes, _Peer] = {}
        self._open: dict[tuple[bytes, int], Request] = {}
        self._gone: set[bytes] = set()
        self._posted: deque[tuple[Request, bytes, bool]] = deque()
        self._probes: deque[float] = deque()
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"server {endpoint}", daemon=True)

    def start(self) -> None:
        """Bind, and serve from now on. Raises IceboxError if the address cannot be bound."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = router_socket(self._context, self._endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._monitor = monitor_socket(self._socket)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()

    def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give open ones `drain_s` to end, end the rest with `draining`, and close.

        A peer that does not take its last replies within FLUSH_S sees the connection end instead.
        """
        if self._thread.ident is None or self._stop_at is not None:
            return
        self._stop_at = time.monotonic() + drain_s
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_drained():
                self._turn(dict(poller.poll(self._patience_ms())))
            self._end_open_requests()
        finally:
            self._socket.disable_monitor()
            self._context.destroy()
            remove_socket_file(self._endpoint)

    def _turn(self, ready: dict[object, int]) -> None:
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        self._send_posted()
        if self._socket in ready:
            self._receive()
        if self._monitor in ready:
            self._schedule_probes()
        self._probe()
        self._send_backlogs()
        while self._gone:
            self._lose(self._gone.pop())

    def _is_drained(self) -> bool:
        if self._stop_at is None:
            return False
        idle = not self._open and not self._posted and not self._has_backlog()
        return idle or time.monotonic() >= self._stop_at

    def _patience_ms(self) -> int | None:
        if self._posted:
            return 0
        times = [self._probes[0]] if self._probes else []
        if self._stop_at is not None:
            times.append(self._stop_at)
        if self._has_backlog():
            times.append(time.monotonic() + RETRY_S)
        return poll_ms(min(times)) if times else None

    def _end_open_requests(self) -> None:
        for request in list(self._open.values()):
            request.close(ErrorCode.DRAINING, f"{self._identity.service} is stopping")
        while self._posted:  # ends: with every request closed, nobody posts
            self._send_posted()
        deadline = time.monotonic() + FLUSH_S
        while self._has_backlog() and time.monotonic() < deadline:
            self._send_backlogs()
            time.sleep(FLUSH_RETRY_S)

    def _has_backlog(self) -> bool:
        return any(peer.backlog for peer in self._peers.values())

    # --- receiving -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(RECEIVE_BURST):
            if not has_input(self._socket):
                return
            peer, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
            request_id = unpack_id(rest[0]) if rest else None
            if request_id is None or len(rest) != 2:
                self._refuse(peer, request_id or ONE_WAY_ID, ErrorCode.BAD_MESSAGE, "frames are not [id][message]")
                continue
            try:
                self._dispatch(peer, request_id, decode(rest[1]))
            except ProtocolError as error:
                self._refuse(peer, request_id, ErrorCode.BAD_MESSAGE, str(error))

    def _dispatch(self, peer: bytes, request_id: int, msg: object) -> None:
        spec = spec_of(msg)
        if spec.one_way != (request_id == ONE_WAY_ID):
            raise ProtocolError(f"request id {request_id} does not suit {type(msg).__name__}")
        if not spec.one_way and not spec.is_request:
            raise ProtocolError(f"{type(msg).__name__} is not a request")
        match msg:
            case Hello():
                self._welcome(peer, request_id, msg)
            case Ping():
                self._send(peer, request_id, encode(self._status()))
            case Cancel():
                if request := self._open.get((peer, msg.request_id)):
                    request.cancelled.set()
            case _:
                self._accept(Request(msg, peer, request_id, self._post))

    def _welcome(self, peer: bytes, request_id: int, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            text = f"{self._identity.service} speaks version {PROTOCOL_VERSION}, you {hello.version}; restart both"
            self._refuse(peer, request_id, ErrorCode.VERSION, text)
            return
        self._peers.setdefault(peer, _Peer(hello.role))
        self._send(peer, request_id, encode(Welcome(PROTOCOL_VERSION, self._identity.service, self._identity.boot_id)))

    def _accept(self, request: Request) -> None:
        key = (request.peer, request.request_id)
        if refusal := self._refusal(request):
            if not request.one_way:
                self._refuse(*key, *refusal)
            return
        if not request.one_way:
            self._open[key] = request
        try:
            self._handle(request)
        except ServiceError as error:
            request.close(error.code, error.detail)
        except Exception as error:
            log.exception("handler failed message=%s", type(request.message).__name__)
            request.close(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")

    def _refusal(self, request: Request) -> tuple[ErrorCode, str] | None:
        if request.peer not in self._peers:
            return ErrorCode.BAD_REQUEST, "say Hello first"
        if self._stop_at is not None:
            return ErrorCode.DRAINING, f"{self._identity.service} is stopping"
        if (request.peer, request.request_id) in self._open:
            return ErrorCode.BAD_REQUEST, f"request id {request.request_id} is in use"
        if len(self._open) >= MAX_OPEN_REQUESTS:
            return ErrorCode.NO_CAPACITY, f"{MAX_OPEN_REQUESTS} requests are open"
        return None

    def _refuse(self, peer: bytes, request_id: int, code: ErrorCode, detail: str) -> None:
        self._send(peer, request_id, encode(ErrorReply(code.value, detail)))

    def _ready(self) -> Pong:
        uptime = time.monotonic() - self._started
        state = ServiceState.READY.value
        return Pong(self._identity.service, self._identity.boot_id, state, "", os.getpid(), uptime)

    # --- sending -------------------------------------------------------------------------------------------------

    def _post(self, request: Request, body: bytes, final: bool) -> bool:
        """Called by requests, in any thread, under the request's lock; so nothing here may close a request."""
        if threading.get_ident() == self._thread.ident and not self._posted:
            self._forward(request, body, final)
        elif not final and len(self._posted) >= MAX_BACKLOG:
            return False
        else:
            self._posted.append((request, body, final))
            os.eventfd_write(self._wake, 1)
        return True

    def _send_posted(self) -> None:
        for _ in range(min(len(self._posted), SEND_BURST)):
            self._forward(*self._posted.popleft())

    def _forward(self, request: Request, body: bytes, final: bool) -> None:
        if final:
            self._open.pop((request.peer, request.request_id), None)
        if request.peer in self._peers:
            self._send(request.peer, request.request_id, body)

    def _send(self, peer: bytes, request_id: int, body: bytes) -> None:
        known = self._peers.get(peer)
        must_wait = known is not None and bool(known.backlog)
        if (must_wait or not self._try_send(peer, pack_id(request_id), body)) and known is not None:
            known.backlog.append((pack_id(request_id), body))

    def _try_send(self, peer: bytes, id_frame: bytes, body: bytes) -> bool:
        """Whether nothing is left to do: sent, or nobody there."""
        try:
            self._socket.send_multipart((peer, id_frame, body), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone.add(peer)
        return True

    def _send_backlogs(self) -> None:
        for name, peer in list(self._peers.items()):
            while peer.backlog and self._try_send(name, *peer.backlog[0]):
                peer.backlog.popleft()
            if len(peer.backlog) > MAX_BACKLOG:
                for request in self._requests_of(name):
                    request.close(ErrorCode.NO_CAPACITY, f"{MAX_BACKLOG} replies wait to be read")

    def _requests_of(self, peer: bytes) -> list[Request]:
        return [request for request in self._open.values() if request.peer == peer]

    # --- peers ---------------------------------------------------------------------------------------------------

    def _schedule_probes(self) -> None:
        events = list(monitor_events(self._monitor))
        if zmq.EVENT_DISCONNECTED in events:
            now = time.monotonic()
            self._probes = deque(now + delay for delay in PROBE_DELAYS_S)

    def _probe(self) -> None:
        due = False
        while self._probes and self._probes[0] <= time.monotonic():
            self._probes.popleft()
            due = True
        if due:
            for peer in list(self._peers):
                self._try_send(peer, pack_id(ONE_WAY_ID), b"")

    def _lose(self, peer: bytes) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        known.backlog.clear()
        for request in self._requests_of(peer):
            request.close(ErrorCode.PEER_LOST, f"the {known.role} went away")
        if self._on_peer_lost is not None:
            self._on_peer_lost(peer)
