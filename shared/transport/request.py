"""One request on the serving side: its message, whether it is still wanted, and the guarantee of one final reply.

Thread-safe. Knows no socket: what it sends goes to the function that it was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto

from shared.errors import ErrorCode
from shared.protocol.codec import encode, is_final, spec_of
from shared.protocol.messages import ErrorReply
from shared.transport.sockets import ONE_WAY_ID


class _State(Enum):
    OPEN = auto()
    ANSWERED = auto()  # by the service
    CLOSED = auto()  # by the server: the peer is gone, the handler raised, or the server stops


# (request, encoded reply, is it the final one) -> False if a part of a stream does not fit any more
Post = Callable[["Request", bytes, bool], bool]


class Request:
    """A request, or a one-way message, on its way through a service.

    `cancelled` is set when nobody wants the answer any more; the service still ends the request, and where the peer
    is gone that reply goes nowhere. A reply that comes after the server has closed the request is dropped.
    """

    __slots__ = ("_lock", "_post", "_state", "cancelled", "message", "peer", "request_id")

    def __init__(self, message: object, peer: bytes, request_id: int, post: Post) -> None:
        self.message = message
        self.peer = peer
        self.request_id = request_id
        self.cancelled = threading.Event()
        self._post = post
        self._lock = threading.Lock()
        self._state = _State.OPEN

    @property
    def one_way(self) -> bool:
        return self.request_id == ONE_WAY_ID

    def reply(self, msg: object) -> None:
        """Send the final reply. Exactly one call per request; ProtocolError if the message cannot be encoded."""
        assert is_final(msg), f"{type(msg).__name__} without a finish reason does not end a request"
        self._send(msg, final=True)

    def stream(self, msg: object) -> None:
        """Send a part of the answer; more follows."""
        assert not is_final(msg), f"{type(msg).__name__} would end the request"
        self._send(msg, final=False)

    def fail(self, code: ErrorCode, detail: str) -> None:
        """Send an error as the final reply."""
        self.reply(ErrorReply(code.value, detail))

    def close(self, code: ErrorCode, detail: str) -> None:
        """The server's own end of a request that the service has not answered; does nothing to an answered one."""
        with self._lock:
            if self._state is _State.OPEN:
                self._close(code, detail)

    def _close(self, code: ErrorCode, detail: str) -> None:
        self._state = _State.CLOSED
        self.cancelled.set()
        if not self.one_way:
            self._post(self, encode(ErrorReply(code.value, detail)), True)

    def _send(self, msg: object, final: bool) -> None:
        expected = spec_of(self.message).reply
        assert not self.one_way, f"{type(self.message).__name__} is one-way: nobody waits for a reply"
        assert isinstance(msg, ErrorReply) or type(msg).__name__ == expected, f"expected {expected}, not {msg!r}"
        body = encode(msg)
        with self._lock:
            assert self._state is not _State.ANSWERED, f"a second final reply to {type(self.message).__name__}"
            if self._state is _State.CLOSED:
                return
            if final:
                self._state = _State.ANSWERED
            if not self._post(self, body, final):
                self._close(ErrorCode.NO_CAPACITY, "the answer comes faster than it can be sent")
