"""Requests that come, run or wait while expertd is being lost or the worker stops: each ends, with the reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from services.worker import service as service_module
from services.worker.engine import FinishReason, Job, Step
from services.worker.service import WorkerService
from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.codec import decode
from shared.protocol.messages import ErrorReply, Generate, TokensGenerated
from shared.transport.request import Request

PATIENCE_S = 10.0


class Losing(WorkerService):
    """Has an expertd until `lose` is set, and then looks for another until the test is over."""

    def __init__(self) -> None:
        self.ready, self.lose, self.looks_again = (threading.Event() for _ in range(3))
        self.context = MagicMock(stopping=False, failure_level=logging.WARNING, ready=self.ready.set)
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


class Endless:
    """An engine that generates until it is cancelled or expertd is lost."""

    def __init__(self, lose: threading.Event) -> None:
        self.runs = threading.Event()
        self._lose = lose

    def generate(self, job: Job, experts: object, cancelled: Callable[[], bool]) -> Iterator[Step]:
        while not cancelled():
            yield Step(1)
            self.runs.set()
            if self._lose.is_set():
                raise PeerLost("killed")
        yield Step(finish=FinishReason.ABORT)


class Ask:
    """A request and its final reply."""

    def __init__(self) -> None:
        self.request = Request(Generate((1,), 1), b"peer", 1, self._post)
        self.reply: object = None
        self.ended = threading.Event()

    def _post(self, request: Request, body: bytes, final: bool) -> bool:
        if final:
            self.reply = decode(body)
            self.ended.set()
        return True


def stop(service: Losing, running: Ask) -> None:
    service.context.stopping = True


def cancel(service: Losing, running: Ask) -> None:
    running.request.cancelled.set()


def lose(service: Losing, running: Ask) -> None:
    service.lose.set()
    assert service.looks_again.wait(PATIENCE_S)  # only then it stops


def lose_while_stopping(service: Losing, running: Ask) -> None:
    service.lose.set()
    service.context.stopping = True


DRAINING = ErrorReply("draining", "the worker is stopping")
GONE = "the expert daemon went away"


@pytest.mark.parametrize(
    ("end", "of_running", "of_waiting"),
    [
        (stop, DRAINING, DRAINING),
        (cancel, "abort", DRAINING),
        (
            lose,
            ErrorReply("peer_lost", f"{GONE} while this request ran: killed"),
            ErrorReply("peer_lost", f"{GONE}: killed"),
        ),
        (lose_while_stopping, DRAINING, DRAINING),
    ],
)
def test_what_ends_a_request_is_what_its_final_reply_says(
    losing: Losing, end: Callable[[Losing, Ask], None], of_running: object, of_waiting: object
) -> None:
    engine = Endless(losing.lose)
    losing._engine.generate = engine.generate  # type: ignore[method-assign]
    thread = threading.Thread(target=losing.run)
    thread.start()
    assert losing.ready.wait(PATIENCE_S)
    running, waiting = Ask(), Ask()
    losing.handle(running.request)
    assert engine.runs.wait(PATIENCE_S)
    losing.handle(waiting.request)
    end(losing, running)
    assert running.ended.wait(PATIENCE_S)
    losing.context.stopping = True
    thread.join(PATIENCE_S)
    reply = running.reply
    assert (reply.finish_reason if isinstance(reply, TokensGenerated) else reply) == of_running
    assert waiting.reply == of_waiting
    with pytest.raises(ServiceError, match="the worker is stopping"):
        losing.handle(Ask().request)
