"""A service's view of its own life, and how it is told."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from shared.config import Config
from shared.runtime.boot import Identity, make_identity
from shared.runtime.context import ServiceContext
from shared.runtime.logs import configure_logs


@pytest.fixture
def context(config: Config) -> ServiceContext:
    return ServiceContext(config, Identity("worker", "b007"))


def state(context: ServiceContext) -> tuple[str, str]:
    pong = context.pong()
    assert (pong.service, pong.boot_id) == ("worker", "b007")
    return pong.state, pong.detail


def test_states(context: ServiceContext) -> None:
    assert state(context) == ("starting", "")
    context.progress("shard 1 of 2")
    assert state(context) == ("starting", "shard 1 of 2")
    context.ready()
    assert state(context) == ("ready", "")
    context.progress("waiting for expertd")
    assert state(context) == ("starting", "waiting for expertd")
    context.drain()
    context.ready()
    context.progress("again")
    assert state(context) == ("draining", "")
    assert not context.stopping


def test_stopping_drains_wakes_and_calls_back_once(context: ServiceContext) -> None:
    called: list[str] = []
    context.on_stop(lambda: called.append("early"))
    assert not context.wait(0.0)
    waiter = threading.Thread(target=context.wait)
    waiter.start()
    context.request_stop()
    context.request_stop()
    waiter.join(5.0)
    assert not waiter.is_alive()
    assert (context.stopping, context.wait(), context.stop.is_set()) == (True, True, True)
    assert state(context)[0] == "draining"
    context.on_stop(lambda: called.append("late"))
    assert called == ["early", "late"]


def test_the_log_has_every_change_of_state_but_not_every_shard(
    context: ServiceContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for shard in range(1000):
            context.progress(f"shard {shard}")
        context.ready()
        context.ready()
        context.progress("waiting for expertd")
        context.drain()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "state=starting shard 0"
    assert messages[-3:] == ["state=ready", "state=starting waiting for expertd", "state=draining"]
    assert len(messages) < 20


def test_a_failure_is_worth_a_warning_until_the_service_stops(context: ServiceContext) -> None:
    assert context.failure_level == logging.WARNING
    context.request_stop()
    assert context.failure_level == logging.INFO


def test_no_two_starts_share_a_boot_id() -> None:
    assert len({make_identity("worker").boot_id for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("under_honcho", "pattern"),
    [(True, "INFO state=ready\n"), (False, r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} worker INFO state=ready\n")],
)
def test_log_lines(
    under_honcho: bool, pattern: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logs("worker", "info", under_honcho)
    logging.captureWarnings(False)
    logging.getLogger("any").info("state=%s", "ready")
    logging.getLogger("any").debug("unseen")
    assert re.fullmatch(pattern, capsys.readouterr().err)
