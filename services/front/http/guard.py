"""Who may come in: the bearer token, and which web pages a browser may speak for.

Without a token only this machine can connect, but so can any page in its browser: a page of another site sends its
`Origin`, and a name that was made to point here (DNS rebinding) stands in `Host`.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.front.http.errors import HttpError

# Pages and probes that come before anybody could give a token. Nothing here says what people asked.
PUBLIC = ("/", "/health")
PUBLIC_FOLDER = "/page/"


Explain = Callable[[Request, Exception], Response]


class Guard:
    """Middleware: a request that may not pass is answered with what `explain` makes of its HttpError."""

    def __init__(self, app: ASGIApp, api_key: str, explain: Explain) -> None:
        self._app = app
        self._api_key = api_key.encode()
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        try:
            self.check(scope["path"], Headers(scope=scope))
        except HttpError as error:
            app = self._explain(Request(scope), error)
        await app(scope, receive, send)

    def check(self, path: str, headers: Headers) -> None:
        """Raises HttpError 401 or 403."""
        host = headers.get("host", "")
        if not self._api_key and not _is_here(host):
            text = f"Host {host[:80]!r} is not this machine; set front.api_key to serve under other names"
            raise HttpError(HTTPStatus.FORBIDDEN, text)
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) != host:
            raise HttpError(HTTPStatus.FORBIDDEN, f"pages of {origin[:80]!r} may not use this server")
        if self._api_key and not is_public(path) and not self._has_key(headers):
            text = "a valid API key is needed: Authorization: Bearer KEY (front.api_key)"
            raise HttpError(HTTPStatus.UNAUTHORIZED, text, www_authenticate="Bearer")

    def _has_key(self, headers: Headers) -> bool:
        """In OpenAI's way or in Anthropic's."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._api_key)


def is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith(PUBLIC_FOLDER)


def _host_of(origin: str) -> str:
    """Host and port of an origin; "" for the origin of a page that has none ("null")."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_here(host: str) -> bool:
    """Whether a Host header names the loopback interface. HTTP/1.0 clients send none."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("", "localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
