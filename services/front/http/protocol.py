"""Limits of a connection that the HTTP library does not have: the time and the length of a request's head, the time of
a body that nobody waits for, and how many connections there may be.

A client that connects and says nothing, or never comes to an end, costs a file descriptor; these limits take it back.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 << 10
# From an answer that came before the end of the request's body to that end.
REST_TIMEOUT_S = 30.0
# Well below the usual limit of 1,024 descriptors a process.
MAX_CONNECTIONS = 800
# What a closing connection gets to take what was written for it.
FLUSH_TIMEOUT_S = 30.0


class LimitedProtocol(HttpToolsProtocol):
    """One connection. In its scope's state a handler finds `abort`, which drops it at once, and `unsent`, which says
    how many bytes written for it are still here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_body = False
        self._is_pipelined = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_CONNECTIONS} connections are open already")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._is_pipelined:
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            if self._is_in_body:
                self._timer = self.loop.call_later(REST_TIMEOUT_S, self._close)
            else:
                self._await_head()
        super().data_received(data)
        if self._timer is not None and not self._is_in_body:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head has over {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"] |= {"abort": self.transport.abort, "unsent": self.transport.get_write_buffer_size}

    def on_headers_complete(self) -> None:
        """A request that comes before the answer to the last one is dropped, and that answer closes the connection.

        HTTP lets the client ask again. To keep it the library would stop reading, and miss that the client leaves.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_pipelined, self.cycle.keep_alive = True, False
            return
        self._is_in_body = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_pipelined:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_pipelined:
            return
        self._is_in_body = False
        super().on_message_complete()
        if self.cycle.response_complete:  # the library's own timer ended when the rest of the body began to come
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1")

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_slow_head(self) -> None:
        self._timer = None
        text = f"the head of the request did not arrive within {HEAD_TIMEOUT_S:g} s"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, text)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer before any handler could, and hang up."""
        self._stop_timer()
        code = status.phrase.lower().replace(" ", "_")
        error = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self._close()

    def _close(self) -> None:
        """Let the client take what was written, but not for ever."""
        if not self.transport.is_closing():
            self.transport.close()
            self.loop.call_later(FLUSH_TIMEOUT_S, self.transport.abort)
