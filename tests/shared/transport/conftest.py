"""An address, and the rule that a closed server or client leaves no thread and no descriptor behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.transport import Service, serving, until

from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: _descriptors() <= descriptors)


@pytest.fixture
def endpoint(tmp_path: Path, _no_leaks: None) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def service(endpoint: str) -> Iterator[Service]:
    """Serving at `endpoint`."""
    service = Service()
    with serving(endpoint, service):
        yield service


@pytest.fixture
def client(endpoint: str, service: Service) -> Iterator[BlockingClient]:
    """Connected to `service`."""
    client = BlockingClient(endpoint, make_identity("worker"))
    client.connect(5.0)
    yield client
    client.close()
