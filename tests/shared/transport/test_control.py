"""Ping from outside: the state of a service that runs, and None for one that does not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.transport import SERVER_CODE, Service, hang, process, serving

from shared.config import Config, ModelSection, RunConfig
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import PROTOCOL_VERSION, Pong
from shared.runtime.boot import make_identity
from shared.transport import server as server_module
from shared.transport.control import ping
from shared.transport.server import Server


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(tmp_path / "c.toml", RunConfig("test", tmp_path), ModelSection(tmp_path))


@contextmanager
def control(config: Config, status: Pong) -> Iterator[None]:
    server = Server(config.endpoint("worker.control"), make_identity("worker"), Service().handle, status=lambda: status)
    server.start()
    yield
    server.stop()


def test_a_service_tells_its_state(config: Config) -> None:
    pong = Pong("worker", "b007", "starting", "shard 3 of 48", 12, 0.5)
    with control(config, pong):
        assert ping(config, "worker", 5.0) == pong
        assert ping(config, "front", 5.0) is None


def test_a_socket_file_without_a_service(config: Config) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(config.run_dir / "worker.control"))
    assert ping(config, "worker", 0.1) is None


def test_a_service_that_hangs(config: Config) -> None:
    with process(SERVER_CODE, config.endpoint("worker.control"), "b007") as service:
        assert ping(config, "worker", 5.0) is not None
        hang(service)
        assert ping(config, "worker", 0.1) is None


def test_another_version_is_not_silence(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with serving(config.endpoint("worker.control"), Service()), pytest.raises(ServiceError) as caught:
        ping(config, "worker", 5.0)
    assert caught.value.code is ErrorCode.VERSION
