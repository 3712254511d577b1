"""Services killed under load: one clear error for what ran, nothing left behind, and everything works again."""

import time
from collections.abc import Callable

import pytest
from helpers.services import (
    ROOT,
    SERVICES,
    generate,
    no_shared_memory_left,
    running,
    token_ids,
    worker_client,
    write_config,
)

from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import ErrorReply, Generate
from shared.stats import StatsSubscriber
from shared.transport.client import BlockingClient

TINY = ROOT / "tests" / "golden" / "tiny-a"
LONG = Generate((5, 6, 7), 400, temperature=0.0)
SHORT = Generate((5, 6, 7), 10, temperature=0.0)
# Noticing takes milliseconds on an idle machine. A ping's deadline would be 5 s: below it, the socket told.
NOTICED_S = 2.0

pytestmark = pytest.mark.system


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "icebox.toml", TINY, cache={"bytes": 12 * 28672})


def test_expertd_killed_under_load(config):
    with no_shared_memory_left(), running(config, "expertd", "worker") as stack, worker_client(stack.config) as client:
        expected = token_ids(generate(client, SHORT))
        request_id = client.start(LONG)
        assert client.poll(20.0) is not None
        waiting_id = client.start(SHORT)
        stack.kill("expertd")
        killed = time.monotonic()
        errors = {}
        while len(errors) < 2:
            reply_id, reply = client.poll(20.0)
            if isinstance(reply, ErrorReply):
                errors[reply_id] = reply
        assert time.monotonic() - killed < NOTICED_S
        assert errors[request_id].code == errors[waiting_id].code == ErrorCode.PEER_LOST.value
        assert "expert daemon went away" in errors[request_id].detail
        with pytest.raises(ServiceError, match="waits for expertd"):
            client.call(SHORT, 5.0)
        stack.start("expertd")
        stack.wait_ready("expertd", "worker")
        assert token_ids(generate(client, SHORT)) == expected
        assert stack.stop() == {"worker": 0, "expertd": 0}


def test_worker_killed_under_load_finds_its_cache_again(config):
    with running(config, "expertd", "worker") as stack:
        with worker_client(stack.config) as client:
            expected = token_ids(generate(client, SHORT))
            client.start(LONG)
            assert client.poll(20.0) is not None
            stack.kill("worker")
            killed = time.monotonic()
            with pytest.raises(PeerLost):
                drain(client)
            assert time.monotonic() - killed < NOTICED_S
        assert _expertd(stack)["slots_resident"] > 0
        stack.start("worker")
        stack.wait_ready("worker")
        with worker_client(stack.config) as client:
            assert token_ids(generate(client, SHORT)) == expected
        assert stack.stop() == {"expertd": 0, "worker": 0}


def test_both_killed_and_started_again_at_once(config):
    with running(config, "expertd", "worker") as stack:
        with worker_client(stack.config) as client:
            expected = token_ids(generate(client, SHORT))
            client.start(LONG)
            assert client.poll(20.0) is not None
            stack.kill("worker")
            stack.kill("expertd")
        stack.start("worker", "expertd")
        stack.wait_ready("worker", "expertd")
        with worker_client(stack.config) as client:
            assert token_ids(generate(client, SHORT)) == expected


def test_sigterm_ends_a_running_request_and_the_process(config):
    """What runs and what waits is told why, at once: a text that is cut off is no answer."""
    with running(config, "expertd", "worker") as stack, worker_client(stack.config) as client:
        ids = {client.start(LONG), client.start(SHORT)}
        assert client.poll(20.0) is not None
        assert stack.terminate("worker") == 0
        errors: dict[int, object] = {}
        with pytest.raises(PeerLost):
            drain(client, lambda request_id, reply: errors.update({request_id: reply}))
        assert errors == dict.fromkeys(ids, ErrorReply(ErrorCode.DRAINING.value, "the worker is stopping"))


def test_a_stop_of_all_services_warns_of_nothing(tmp_path):
    """They see each other go, and a request ends."""
    config = write_config(tmp_path / "icebox.toml", ROOT / "demo" / "checkpoint", front={"http_port": 0})
    with running(config) as stack, worker_client(stack.config) as client:
        client.start(LONG)
        assert client.poll(20.0) is not None
        assert set(stack.stop().values()) == {0}
        logs = "".join(stack.log(name) for name in SERVICES)
    assert [line for line in logs.splitlines() if " INFO " not in line] == []


def drain(client: BlockingClient, see: Callable[[int, object], None] = lambda request_id, reply: None) -> None:
    """Take replies until the peer is lost, which is raised."""
    while True:
        event = client.poll(20.0)
        assert event is not None
        see(*event)


def _expertd(stack) -> dict[str, float]:
    subscriber = StatsSubscriber([stack.config.endpoint("expertd.stats")])
    try:
        snapshot = subscriber.poll(5.0)
        assert snapshot is not None
        return snapshot.values
    finally:
        subscriber.close()
