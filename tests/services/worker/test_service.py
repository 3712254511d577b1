"""Requests that arrive while expertd is being lost: each is refused or failed, none is forgotten."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from services.worker import service as service_module
from services.worker.engine import Job
from services.worker.service import WorkerService
from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import Generate

PATIENCE_S = 10.0


class Losing(WorkerService):
    """Has an expertd until `lose` is set, and then looks for another until the test is over."""

    def __init__(self) -> None:
        self.ready, self.lose, self.looks_again = (threading.Event() for _ in range(3))
        self.context = MagicMock(stopping=False, ready=self.ready.set)
        self.context.config.worker.max_queue = 4
        super().__init__(self.context, MagicMock(decoder=None, max_context=100), "fingerprint")
        self._engine.model.config.vocab_size = 10

    def _open(self, client: object) -> MagicMock:
        if self.ready.is_set():
            self.looks_again.set()
            raise service_module.Stopped
        return MagicMock(check_peer=self._check_peer)

    def _check_peer(self) -> None:
        if self.lose.is_set():
            raise PeerLost("killed")


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Losing:
    monkeypatch.setattr(service_module.RecordLayout, "of", lambda config: SimpleNamespace(record_bytes=1))
    return Losing()


def test_a_request_that_is_checked_while_expertd_is_lost_is_refused(
    losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_checked, go_on, refusals = threading.Event(), threading.Event(), []

    def check(self: Job, vocab_size: int, max_context: int) -> None:
        is_checked.set()
        assert go_on.wait(PATIENCE_S)

    def ask() -> None:
        try:
            losing.handle(MagicMock(message=Generate((1,), 1)))
        except ServiceError as error:
            refusals.append(error.code)

    monkeypatch.setattr(Job, "check", check)
    threads = [threading.Thread(target=losing.run), threading.Thread(target=ask)]
    threads[0].start()
    assert losing.ready.wait(PATIENCE_S)
    threads[1].start()
    assert is_checked.wait(PATIENCE_S)
    losing.lose.set()
    assert losing.looks_again.wait(PATIENCE_S)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert refusals == [ErrorCode.STARTING]
