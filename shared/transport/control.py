"""Asking a service how it is: one Ping on its control socket, from whatever process wants to know."""

from __future__ import annotations

from pathlib import Path

from shared.config import Config
from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import Ping, Pong
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient


def ping(config: Config, service: str, timeout_s: float) -> Pong | None:
    """The service's state, or None if nobody answers: at once if it never started, else after `timeout_s`.

    Raises:
        ServiceError: it answers, but with an error (another version of the protocol).
    """
    endpoint = config.endpoint(f"{service}.control")
    if not Path(endpoint.removeprefix("ipc://")).exists():
        return None
    client = BlockingClient(endpoint, make_identity("control"))
    try:
        client.connect(timeout_s)
        pong = client.call(Ping(), timeout_s)
    except PeerLost:
        return None
    except ServiceError as error:
        if error.code is ErrorCode.TIMEOUT:
            return None
        raise
    finally:
        client.close()
    assert isinstance(pong, Pong)
    return pong
