"""The HTTP server inside the front's event loop: bound at once, named in the run directory, gone when told to."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from services.front.http.protocol import LimitedProtocol
from shared.config import Config
from shared.errors import ConfigError, LockedError

log = logging.getLogger(__name__)

BACKLOG = 512
# What the kernel may hold for a connection, so that it shows soon whether a client reads; Linux takes twice as much.
SEND_BYTES = 64 << 10
# Idle connections are closed after this.
KEEP_ALIVE_S = 30
# When the service stops, what open connections get to end.
SHUTDOWN_S = 2


class HttpServer:
    """Made in the loop that will run it. `url` is where it listens."""

    def __init__(self, config: Config, app: ASGIApp) -> None:
        """Bind the address and write it down.

        Raises:
            LockedError: the port is taken.
            ConfigError: the address cannot be used.
        """
        assert config.front.http_port is not None
        self._socket = _bind(config.front.http_host, config.front.http_port)
        self._path = config.http_address_file
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _write(self._path, self.url)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients do wrong is told to them
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=LimitedProtocol,
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )

    async def serve(self) -> None:
        """Until `stop`."""
        log.info("http url=%s", self.url)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    @property
    def gauges(self) -> dict[str, float]:
        state = self._server.server_state
        return {"http_connections": len(state.connections), "http_requests": len(state.tasks)}

    def stop(self) -> None:
        """Take no more connections and let `serve` return: when all answers have ended, or soon."""
        self._server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    where = f"front.http_host = {host!r}, front.http_port = {port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{where}: not an address of this machine ({error.strerror})") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # every connection inherits it
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
        return bound
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise LockedError(f"{where}: another program listens there; stop it, or set another port") from error
        raise ConfigError(f"{where}: cannot listen there ({error.strerror})") from error


def _write(path: Path, url: str) -> None:
    """At once or not at all, so that who reads it never sees half an address."""
    new = path.with_suffix(".new")
    new.write_text(url + "\n", encoding="ascii")
    os.replace(new, path)
