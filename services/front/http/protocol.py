"""Limits of a connection that the HTTP library does not have: the time and the length of a request's head, and how
many connections there may be.

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
# Well below the usual limit of 1,024 descriptors a process.
MAX_CONNECTIONS = 800
# What a closing connection gets to take what was written for it.
FLUSH_TIMEOUT_S = 30.0


class LimitedProtocol(HttpToolsProtocol):
    """One connection. In its scope's state a handler finds `abort`, which drops it at once, and `unsent`, which says
    how many bytes written for it are still here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_CONNECTIONS} connections are open already")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_complete()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head has over {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"] |= {"abort": self.transport.abort, "unsent": self.transport.get_write_buffer_size}

    def on_headers_complete(self) -> None:
        self._head_complete()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1")

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _head_complete(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        self._head_timer = None
        text = f"the head of the request did not arrive within {HEAD_TIMEOUT_S:g} s"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, text)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer before any handler could, and hang up."""
        self._head_complete()
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
