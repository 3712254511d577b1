"""The blocking client: overlapping requests, time-outs, and a peer that dies, restarts or talks nonsense."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from helpers.transport import (
    HOLD,
    LATER,
    REFUSE,
    REPLY,
    SERVER_CODE,
    Service,
    endless,
    fetch,
    generate,
    hang,
    process,
    serving,
    tokens,
    until,
)

from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.codec import encode
from shared.protocol.messages import PROTOCOL_VERSION, Cancel, ErrorReply, ExpertsFetched, PrefetchHint, Welcome
from shared.runtime.boot import Identity, make_identity
from shared.transport.client import BlockingClient
from shared.transport.sockets import REQUEST_HWM, pack_id


@contextmanager
def connected(endpoint: str) -> Iterator[BlockingClient]:
    client = BlockingClient(endpoint, make_identity("worker"))
    try:
        client.connect(10.0)
        yield client
    finally:
        client.close()


@contextmanager
def scripted(endpoint: str, *bodies: bytes) -> Iterator[None]:
    """A service that answers one request with each of `bodies`, and reads nothing more."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVHWM, 1)
    router.bind(endpoint)

    def answer() -> None:
        for body in bodies:
            peer, id_frame, _ = router.recv_multipart()
            router.send_multipart([peer, pack_id(999_999), body])
            router.send_multipart([peer, id_frame, body])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        context.destroy(linger=0)


WELCOME = encode(Welcome(PROTOCOL_VERSION, "expertd", "b007"))


def test_calls_and_their_errors(client: BlockingClient) -> None:
    assert client.call(fetch(REPLY), 5.0) == ExpertsFetched()
    assert client.call(fetch(LATER), 5.0) == ExpertsFetched()
    with pytest.raises(ServiceError, match="the disk is on fire") as caught:
        client.call(fetch(REFUSE), 5.0)
    assert caught.value.code is ErrorCode.IO_ERROR
    assert client.call(fetch(REPLY), 5.0) == ExpertsFetched()


def test_requests_finish_in_any_order(client: BlockingClient, service: Service) -> None:
    slow = client.start(fetch(HOLD))
    fast = client.start(fetch(REPLY))
    assert client.finish(fast, 5.0) == ExpertsFetched()
    service.held[0].reply(ExpertsFetched())
    assert client.finish(slow, 5.0) == ExpertsFetched()


def test_poll_gives_every_reply_with_its_id(client: BlockingClient) -> None:
    stream, refused = client.start(generate(2)), client.start(fetch(REFUSE))
    events = [client.poll(5.0) for _ in range(4)]
    assert [msg for i, msg in filter(None, events) if i == stream] == [
        tokens(0),
        tokens(1),
        tokens(finish_reason="length"),
    ]
    assert (refused, ErrorReply("io_error", "the disk is on fire")) in events
    assert client.poll(0.0) is None


def test_finish_of_a_stream_is_its_last_part(client: BlockingClient) -> None:
    assert client.finish(client.start(generate(50)), 5.0) == tokens(finish_reason="length")
    assert client.poll(0.0) is None


def test_finish_of_a_stream_that_has_arrived_already(client: BlockingClient, service: Service) -> None:
    request_id = client.start(generate(0))
    until(lambda: service.held)
    for token in range(3):
        service.held[0].stream(tokens(token))
    service.held[0].reply(tokens(finish_reason="stop"))
    assert client.call(fetch(REPLY), 5.0) == ExpertsFetched()  # came later, so all of the stream is here
    assert client.finish(request_id, 0.0) == tokens(finish_reason="stop")
    assert client.poll(0.0) is None


def test_poll_waits_no_longer_than_told(client: BlockingClient) -> None:
    started = time.monotonic()
    assert client.poll(0.05) is None
    assert 0.05 <= time.monotonic() - started < 0.5


def test_cancel_ends_a_stream(client: BlockingClient) -> None:
    request_id = client.start(endless())
    assert client.poll(5.0) == (request_id, tokens(0))
    client.cancel(request_id)
    assert client.finish(request_id, 5.0) == tokens(finish_reason="abort")
    client.cancel(request_id)
    assert client.call(fetch(REPLY), 5.0) == ExpertsFetched()


def test_forgotten_replies_do_not_appear(client: BlockingClient, service: Service) -> None:
    early, late = client.start(fetch(REPLY)), client.start(fetch(HOLD))
    client.call(fetch(REPLY), 5.0)
    client.forget(early)
    client.forget(late)
    service.held[0].reply(ExpertsFetched())
    client.call(fetch(REPLY), 5.0)
    assert client.poll(0.0) is None


def test_a_time_out_cancels_and_a_late_reply_is_dropped(client: BlockingClient, service: Service) -> None:
    with pytest.raises(ServiceError, match=r"within 0\.05 s") as caught:
        client.call(fetch(HOLD), 0.05)
    assert caught.value.code is ErrorCode.TIMEOUT
    assert service.held[0].cancelled.wait(5.0)
    service.held[0].reply(ExpertsFetched())
    client.call(fetch(REPLY), 5.0)
    assert client.poll(0.0) is None


def test_one_way_messages_arrive_in_order(client: BlockingClient, service: Service) -> None:
    hints = [PrefetchHint(i, (i,)) for i in range(10)]
    for hint in hints:
        client.send(hint)
    client.call(fetch(REPLY), 5.0)
    assert service.hints == hints


def test_wrong_kinds_of_messages_are_our_bugs(client: BlockingClient) -> None:
    with pytest.raises(AssertionError, match="not a request"):
        client.start(PrefetchHint(0, ()))
    with pytest.raises(AssertionError, match="not one-way"):
        client.send(fetch(REPLY))
    with pytest.raises(AssertionError, match="not pending"):
        client.finish(12345, 0.0)


# --- connecting ----------------------------------------------------------------------------------------------------


def test_connect_to_nobody(endpoint: str) -> None:
    client = BlockingClient(endpoint, make_identity("worker"))
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"the service at ipc://.*/s does not answer"):
        client.connect(0.1)
    assert time.monotonic() - started < 0.5
    with pytest.raises(PeerLost):
        client.start(fetch(REPLY))
    client.close()


def test_before_connect_nothing_works(endpoint: str) -> None:
    client = BlockingClient(endpoint, make_identity("worker"))
    for use in (lambda: client.call(fetch(REPLY), 1.0), lambda: client.poll(0.0), lambda: client.send(Cancel(1))):
        with pytest.raises(PeerLost, match="not connected"):
            use()
    client.close()


def test_connect_waits_for_a_service_that_comes_later(endpoint: str) -> None:
    client = BlockingClient(endpoint, make_identity("worker"))
    with pytest.raises(PeerLost):
        client.connect(0.05)
    with serving(endpoint, Service(), Identity("expertd", "b007")):
        assert client.connect(5.0) == Welcome(PROTOCOL_VERSION, "expertd", "b007")
        client.close()


def test_connect_to_a_service_that_hangs(endpoint: str) -> None:
    with process(SERVER_CODE, endpoint, "b007") as server, connected(endpoint):
        hang(server)
        client = BlockingClient(endpoint, make_identity("worker"))
        with pytest.raises(PeerLost, match="does not"):
            client.connect(0.1)
        client.close()


def test_connect_to_one_who_never_welcomes(endpoint: str) -> None:
    with scripted(endpoint):
        client = BlockingClient(endpoint, make_identity("worker"))
        with pytest.raises(PeerLost, match="does not say Welcome"):
            client.connect(0.1)
        client.close()


# --- peers that die ------------------------------------------------------------------------------------------------


def test_a_killed_service_is_noticed_within_100_ms(endpoint: str) -> None:
    with process(SERVER_CODE, endpoint, "b007") as server, connected(endpoint) as client:
        waiting, other = client.start(fetch(HOLD)), client.start(fetch(HOLD))
        server.kill()
        killed = time.monotonic()
        with pytest.raises(PeerLost, match="went away"):
            client.finish(waiting, 5.0)
        assert time.monotonic() - killed < 0.1
        for use in (
            lambda: client.finish(other, 5.0),
            lambda: client.poll(5.0),
            lambda: client.start(fetch(REPLY)),
            lambda: client.send(PrefetchHint(0, ())),
        ):
            with pytest.raises(PeerLost, match="went away"):
                use()
        client.cancel(other)
        client.forget(other)


def test_an_idle_client_learns_of_it_by_poll(endpoint: str) -> None:
    with process(SERVER_CODE, endpoint, "b007") as server, connected(endpoint) as client:
        assert client.poll(0.0) is None
        server.kill()
        killed = time.monotonic()
        with pytest.raises(PeerLost):
            client.poll(5.0)
        assert time.monotonic() - killed < 0.1


def test_a_restart_is_a_loss_even_if_it_is_quick(endpoint: str) -> None:
    client = BlockingClient(endpoint, make_identity("worker"))
    with process(SERVER_CODE, endpoint, "first") as server:
        assert client.connect(10.0).boot_id == "first"
        before = client.start(fetch(HOLD))
        server.kill()
        server.wait()
    with _renewed(endpoint) as second:
        with pytest.raises(PeerLost):
            client.call(fetch(REPLY), 5.0)
        with pytest.raises(PeerLost):
            client.finish(before, 5.0)
        assert client.connect(5.0).boot_id == "second"
        client.call(fetch(LATER), 5.0)
        client.close()
    assert [request.message for request in second.seen] == [fetch(LATER)]


@contextmanager
def _renewed(endpoint: str) -> Iterator[Service]:
    service = Service()
    with serving(endpoint, service, Identity("expertd", "second")):
        yield service


def test_nothing_reaches_the_successor_before_connect(endpoint: str) -> None:
    client = BlockingClient(endpoint, make_identity("worker"))
    with process(SERVER_CODE, endpoint, "first"):
        client.connect(10.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    successor = context.socket(zmq.ROUTER)
    successor.bind(endpoint)
    client.start(fetch(HOLD))  # sent before the loss is noticed
    assert not successor.poll(300)
    with pytest.raises(PeerLost):
        client.poll(0.0)
    client.close()
    context.destroy(linger=0)


def test_what_the_service_said_before_it_stopped_is_delivered(endpoint: str) -> None:
    for _ in range(20):
        service = Service()
        with serving(endpoint, service) as server, connected(endpoint) as client:
            answered = [client.start(fetch(REPLY)) for _ in range(20)]
            held = client.start(fetch(HOLD))
            until(lambda service=service: service.held)  # type: ignore[misc]
            server.stop()
            with pytest.raises(ServiceError) as caught:
                client.finish(held, 5.0)
            assert caught.value.code is ErrorCode.DRAINING
            assert [client.finish(request_id, 5.0) for request_id in answered] == [ExpertsFetched()] * 20
            with pytest.raises(PeerLost):
                client.poll(5.0)


# --- peers that misbehave ------------------------------------------------------------------------------------------


def test_garbage_is_an_error_of_that_request(endpoint: str) -> None:
    with scripted(endpoint, WELCOME, b"\xc1", encode(ExpertsFetched())), connected(endpoint) as client:
        with pytest.raises(ServiceError, match="no message") as caught:
            client.call(fetch(REPLY), 5.0)
        assert caught.value.code is ErrorCode.BAD_MESSAGE
        assert client.call(fetch(REPLY), 5.0) == ExpertsFetched()


def test_an_error_code_from_the_future_is_internal(endpoint: str) -> None:
    error = encode(ErrorReply("out_of_luck", "sorry"))
    with scripted(endpoint, WELCOME, error), connected(endpoint) as client:
        with pytest.raises(ServiceError, match="sorry") as caught:
            client.call(fetch(REPLY), 5.0)
        assert caught.value.code is ErrorCode.INTERNAL


def test_a_service_that_does_not_read_is_out_of_capacity(endpoint: str) -> None:
    big = fetch(HOLD, *range(30_000))
    with scripted(endpoint, WELCOME), connected(endpoint) as client:
        with pytest.raises(ServiceError, match="does not read") as caught:
            _start_many(client, big, REQUEST_HWM + 100)
        assert caught.value.code is ErrorCode.NO_CAPACITY


def _start_many(client: BlockingClient, msg: object, count: int) -> None:
    for _ in range(count):
        client.start(msg)


def test_another_version_is_an_error_at_connect(endpoint: str) -> None:
    refusal = encode(ErrorReply("version", "expertd speaks version 2"))
    with scripted(endpoint, refusal):
        client = BlockingClient(endpoint, make_identity("worker"))
        with pytest.raises(ServiceError, match="speaks version 2") as caught:
            client.connect(5.0)
        assert caught.value.code is ErrorCode.VERSION
        client.close()
