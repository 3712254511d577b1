"""The server's promise: whatever happens, a request gets one final reply, and the server goes on."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.transport import (
    CLIENT_CODE,
    HOLD,
    LATER,
    RAISE,
    REFUSE,
    REPLY,
    RawPeer,
    Service,
    endless,
    fetch,
    generate,
    process,
    serving,
    tokens,
    until,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import ErrorCode, IceboxError
from shared.protocol.codec import encode, is_final
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ErrorReply,
    ExpertsFetched,
    Hello,
    Ping,
    Pong,
    PoolClosed,
    PrefetchHint,
    TokensGenerated,
    Welcome,
)
from shared.runtime.boot import Identity, make_identity
from shared.transport import server as server_module
from shared.transport import sockets as sockets_module
from shared.transport.request import Request
from shared.transport.server import Server
from shared.transport.sockets import pack_id


def code_of(reply: object) -> str:
    assert isinstance(reply, ErrorReply), reply
    return reply.code


def test_hello_tells_who_is_there(endpoint: str) -> None:
    with serving(endpoint, Service(), Identity("expertd", "b007")), RawPeer(endpoint, hello=False) as peer:
        reply = peer.request(Hello(PROTOCOL_VERSION, "worker", "00"))
        assert reply == Welcome(PROTOCOL_VERSION, "expertd", "b007")


def test_another_version_is_told_so(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint, hello=False) as peer:
        assert code_of(peer.request(Hello(PROTOCOL_VERSION + 1, "worker", "00"))) == ErrorCode.VERSION
        assert code_of(peer.request(fetch(REPLY))) == ErrorCode.BAD_REQUEST
    assert not service.seen


def test_a_request_before_hello_never_reaches_the_service(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint, hello=False) as peer:
        assert code_of(peer.request(fetch(REPLY))) == ErrorCode.BAD_REQUEST
        peer.send(0, PrefetchHint(0, ()))
        assert isinstance(peer.request(Ping()), Pong)
    assert not service.seen


def test_ping_reports_the_status_given(endpoint: str) -> None:
    pong = Pong("worker", "b007", "starting", "shard 3 of 48", 12, 0.5)
    server = Server(endpoint, make_identity("worker"), Service().handle, status=lambda: pong)
    server.start()
    with RawPeer(endpoint, hello=False) as peer:
        assert peer.request(Ping()) == pong
    server.stop()


def test_ping_without_a_status_is_ready(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint) as peer:
        pong = peer.request(Ping())
    assert isinstance(pong, Pong)
    assert (pong.state, pong.pid) == ("ready", os.getpid())


@pytest.mark.parametrize("behaviour", [REPLY, LATER])
def test_a_reply_from_any_thread(endpoint: str, service: Service, behaviour: int) -> None:
    with RawPeer(endpoint) as peer:
        assert peer.request(fetch(behaviour)) == ExpertsFetched()


def test_a_handler_that_raises_is_a_reply(endpoint: str, service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with RawPeer(endpoint) as peer:
        reply = peer.request(fetch(RAISE))
        assert code_of(reply) == ErrorCode.INTERNAL
        assert "a bug in the handler" in reply.detail  # type: ignore[attr-defined]
        assert "ZeroDivisionError" in caplog.text
        caplog.clear()
        assert peer.request(fetch(REFUSE)) == ErrorReply("io_error", "the disk is on fire")
        assert not caplog.text
        assert peer.request(fetch(REPLY)) == ExpertsFetched()


def test_a_stream_arrives_in_order_with_its_end_last(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint) as peer:
        peer.send(9, generate(1000))
        for token in range(1000):
            assert peer.receive() == (9, tokens(token))
        assert peer.receive() == (9, tokens(finish_reason="length"))


def test_a_service_that_breaks_the_rules_is_told(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint) as peer:
        peer.send(1, fetch(HOLD))
        peer.send(0, PrefetchHint(0, ()))
        until(lambda: len(service.seen) == 2)
        request, hint = service.seen
        with pytest.raises(AssertionError, match="one-way"):
            hint.reply(ExpertsFetched())
        with pytest.raises(AssertionError, match="expected ExpertsFetched"):
            request.reply(PoolClosed())
        with pytest.raises(AssertionError, match="does not end"):
            request.reply(tokens(1))
        with pytest.raises(AssertionError, match="would end"):
            request.stream(ExpertsFetched())
        request.reply(ExpertsFetched())
        with pytest.raises(AssertionError, match="second final"):
            request.reply(ExpertsFetched())
        with pytest.raises(AssertionError, match="second final"):
            request.fail(ErrorCode.INTERNAL, "")
        assert peer.receive() == (1, ExpertsFetched())


def test_cancel_marks_the_request_and_the_service_ends_it(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint) as peer:
        peer.send(5, fetch(HOLD))
        peer.send(6, fetch(HOLD))
        for unknown_or_repeated in (5, 5, 77, 0, 2**63):
            peer.send(0, Cancel(unknown_or_repeated))
        peer.request(Ping())
        assert [request.cancelled.is_set() for request in service.held] == [True, False]
        service.held[0].fail(ErrorCode.CANCELLED, "as you wish")
        assert peer.receive() == (5, ErrorReply("cancelled", "as you wish"))


def test_nobody_cancels_the_requests_of_others(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint) as peer, RawPeer(endpoint) as other:
        peer.send(5, fetch(HOLD))
        service.arrived.acquire(timeout=5)
        other.send(0, Cancel(5))
        other.request(Ping())
        assert not service.held[0].cancelled.is_set()


def test_an_id_in_use_is_refused(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint) as peer:
        peer.send(5, fetch(HOLD))
        peer.send(5, fetch(REPLY))
        request_id, reply = peer.receive()
        assert (request_id, code_of(reply)) == (5, ErrorCode.BAD_REQUEST)
        assert len(service.seen) == 1


def test_too_many_open_requests_are_refused(endpoint: str, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_OPEN_REQUESTS", 3)
    with RawPeer(endpoint) as peer:
        for request_id in (1, 2, 3, 4):
            peer.send(request_id, fetch(HOLD))
        request_id, reply = peer.receive()
        assert (request_id, code_of(reply)) == (4, ErrorCode.NO_CAPACITY)
        service.held[0].reply(ExpertsFetched())
        assert peer.receive() == (1, ExpertsFetched())
        assert peer.request(fetch(REPLY)) == ExpertsFetched()


# --- malformed -----------------------------------------------------------------------------------------------------

MALFORMED = [
    [],
    [b""],
    [b"short"],
    [b"123456789"],
    [pack_id(7)],
    [pack_id(7), b""],
    [pack_id(7), b"garbage"],
    [pack_id(7), encode(ExpertsFetched())],
    [pack_id(7), encode(PrefetchHint(0, ()))],
    [pack_id(7), encode(Ping()), b"extra"],
    [pack_id(0), encode(fetch(REPLY))],
    [pack_id(0), b""],
]


@pytest.mark.parametrize("frames", MALFORMED, ids=repr)
def test_malformed_frames_are_answered_and_the_server_goes_on(
    endpoint: str, service: Service, frames: list[bytes]
) -> None:
    with RawPeer(endpoint) as peer:
        peer.socket.send_multipart(frames or [b""])
        request_id, reply = peer.receive()
        assert code_of(reply) == ErrorCode.BAD_MESSAGE
        assert request_id == (7 if frames and frames[0] == pack_id(7) else 0)
        assert peer.request(fetch(REPLY)) == ExpertsFetched()
    assert len(service.seen) == 1


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=4), max_size=20))
def test_any_frames_leave_the_server_serving(endpoint: str, service: Service, messages: list[list[bytes]]) -> None:
    with RawPeer(endpoint) as peer:
        for frames in messages:
            peer.socket.send_multipart(frames)
        peer.send(2**60, fetch(REPLY))
        while peer.receive() != (2**60, ExpertsFetched()):
            pass


# --- peers that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_requests", [0, 3])
def test_a_killed_peer_is_noticed_within_100_ms(endpoint: str, service: Service, open_requests: int) -> None:
    with RawPeer(endpoint) as other, process(CLIENT_CODE, endpoint, open_requests) as peer:
        until(lambda: len(service.held) == open_requests)
        peer.kill()
        killed = time.monotonic()
        assert service.someone_lost.wait(5.0)
        assert time.monotonic() - killed < 0.1
        assert len(service.lost) == 1
        assert all(request.cancelled.is_set() and request.peer == service.lost[0] for request in service.held)
        for request in service.held:
            request.reply(ExpertsFetched())
        assert other.request(fetch(REPLY)) == ExpertsFetched()
        assert len(service.lost) == 1


def test_many_peers_that_leave_are_all_noticed(endpoint: str, service: Service) -> None:
    peers = [RawPeer(endpoint) for _ in range(20)]
    for peer in peers[::2]:
        peer.close()
    until(lambda: len(service.lost) == 10)
    for peer in peers[1::2]:
        assert peer.request(fetch(REPLY)) == ExpertsFetched()
        peer.close()
    until(lambda: len(service.lost) == 20)
    assert max(Counter(service.lost).values()) == 1


def test_a_peer_that_leaves_during_its_stream_ends_it(endpoint: str, service: Service) -> None:
    with RawPeer(endpoint) as peer:
        peer.send(1, endless())
        peer.receive()
    until(lambda: service.seen[0].cancelled.is_set())
    until(lambda: not any(thread.name.endswith("(_stream)") for thread in threading.enumerate()))


def test_a_peer_that_does_not_read_loses_its_requests_and_harms_nobody(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_BACKLOG", 20)
    service = Service()
    with serving(endpoint, service) as server, RawPeer(endpoint) as lazy, RawPeer(endpoint) as other:
        lazy.send(1, fetch(HOLD))
        lazy.send(2, generate(0))
        until(lambda: len(service.held) == 2)
        stream = service.held[1]
        while not stream.cancelled.is_set():
            stream.stream(tokens(*range(1000)))
            until(lambda: not server._posted)
        assert other.request(fetch(REPLY)) == ExpertsFetched()
        finals = []
        while len(finals) < 2:
            request_id, reply = lazy.receive()
            if is_final(reply):
                finals.append((request_id, code_of(reply)))
        assert sorted(finals) == [(1, ErrorCode.NO_CAPACITY), (2, ErrorCode.NO_CAPACITY)]
        assert lazy.request(fetch(REPLY)) == ExpertsFetched()


def test_what_waits_to_be_sent_is_bounded(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BACKLOG", 50)
    service, busy, go_on = Service(), threading.Event(), threading.Event()

    def handle(request: Request) -> None:
        if isinstance(request.message, PrefetchHint):  # keeps the server's thread from sending
            busy.set()
            go_on.wait(30.0)
        else:
            service.handle(request)

    server = Server(endpoint, make_identity("worker"), handle)
    server.start()
    with RawPeer(endpoint) as peer:
        peer.send(1, generate(0))
        peer.send(0, PrefetchHint(0, ()))
        assert busy.wait(5.0)
        (stream,) = service.held
        for token in range(50):
            stream.stream(tokens(token))
        assert not stream.cancelled.is_set()
        stream.stream(tokens(50))
        assert stream.cancelled.is_set()
        stream.stream(tokens(51))
        stream.reply(tokens(finish_reason="abort"))
        assert len(server._posted) == 51
        go_on.set()
        assert [peer.receive() for _ in range(50)] == [(1, tokens(token)) for token in range(50)]
        request_id, reply = peer.receive()
        assert (request_id, code_of(reply)) == (1, ErrorCode.NO_CAPACITY)
        assert peer.request(fetch(REPLY)) == ExpertsFetched()
    server.stop()


def test_a_stream_without_pause_starves_neither_others_nor_stop(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service, over = Service(), threading.Event()
    with serving(endpoint, service) as server, RawPeer(endpoint) as fast, RawPeer(endpoint) as other:
        fast.send(1, generate(0))
        until(lambda: service.held)
        forward = server._forward

        def forward_and_post_again(request: Request, body: bytes, final: bool) -> None:
            """As if a thread posted the next part whenever one has left."""
            if final or request.cancelled.is_set() or over.is_set():
                forward(request, body, final)
            else:
                server._posted.append((request, body, final))

        monkeypatch.setattr(server, "_forward", forward_and_post_again)
        try:
            service.held[0].stream(tokens(1))
            for _ in range(20):
                assert isinstance(other.request(Ping()), Pong)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            stopping.join(5.0)
            assert not stopping.is_alive()
        finally:
            over.set()


# --- stopping ------------------------------------------------------------------------------------------------------


def test_stop_ends_open_requests_and_drops_what_comes_later(endpoint: str) -> None:
    service = Service()
    with RawPeer(endpoint, hello=False) as peer:
        with serving(endpoint, service):
            peer.request(Hello(PROTOCOL_VERSION, "worker", "00"))
            for request_id in (1, 2, 3):
                peer.send(request_id, fetch(HOLD))
            until(lambda: len(service.held) == 3)
        replies = dict(peer.receive() for _ in range(3))
        assert {code_of(reply) for reply in replies.values()} == {ErrorCode.DRAINING}
        assert set(replies) == {1, 2, 3}
        for request in service.held:
            assert request.cancelled.is_set()
            request.reply(ExpertsFetched())


def test_stop_gets_every_last_reply_through_a_full_pipe(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "REQUEST_HWM", 16)
    service = Service()
    with RawPeer(endpoint, hello=False) as peer:
        with serving(endpoint, service):
            peer.request(Hello(PROTOCOL_VERSION, "worker", "00"))
            for request_id in range(1, 201):
                peer.send(request_id, fetch(HOLD))
            until(lambda: len(service.held) == 200)
        replies = dict(peer.receive() for _ in range(200))
        assert {code_of(reply) for reply in replies.values()} == {ErrorCode.DRAINING}
        assert set(replies) == set(range(1, 201))


def test_stop_waits_for_what_can_end_in_time_and_takes_nothing_new(endpoint: str) -> None:
    service = Service()
    with RawPeer(endpoint, hello=False) as peer, serving(endpoint, service) as server:
        peer.request(Hello(PROTOCOL_VERSION, "worker", "00"))
        peer.send(1, fetch(HOLD))
        until(lambda: service.held)
        stopping = threading.Thread(target=server.stop, args=(5.0,))
        stopping.start()
        until(lambda: server._stop_at is not None)
        peer.send(2, fetch(REPLY))
        request_id, reply = peer.receive()
        assert (request_id, code_of(reply)) == (2, ErrorCode.DRAINING)
        service.held[0].reply(ExpertsFetched())
        assert peer.receive() == (1, ExpertsFetched())
        stopping.join(2.0)
        assert not stopping.is_alive()


def test_stop_twice_and_without_start(endpoint: str) -> None:
    server = Server(endpoint, make_identity("expertd"), Service().handle)
    server.stop()
    server.start()
    server.stop()
    server.stop()
    assert not Path(endpoint.removeprefix("ipc://")).exists()


def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/missing/s"
    with pytest.raises(IceboxError, match="missing/s"):
        Server(endpoint, make_identity("expertd"), Service().handle).start()


# --- all of it at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_one_final_reply_each_under_everything_at_once(endpoint: str, seed: int) -> None:
    rng = random.Random(seed)
    service = Service()
    finals: Counter[int] = Counter()
    with RawPeer(endpoint, hello=False) as peer:
        with serving(endpoint, service):
            peer.request(Hello(PROTOCOL_VERSION, "worker", "00"))
            for request_id in range(1, 301):
                _send_something(peer, request_id, rng)
                if service.held and rng.random() < 0.3:
                    service.held.pop().reply(ExpertsFetched())
                while peer.socket.poll(0):
                    _count(finals, peer)
            until(lambda: len(service.seen) == 300)
        while finals.total() < 300:
            _count(finals, peer)
    assert set(finals.values()) == {1}
    assert set(finals) == set(range(1, 301))


def _send_something(peer: RawPeer, request_id: int, rng: random.Random) -> None:
    if rng.random() < 0.2:
        peer.send(request_id, generate(rng.randrange(1, 20)))
    else:
        peer.send(request_id, fetch(rng.randrange(5)))
    if rng.random() < 0.3:
        peer.send(0, Cancel(rng.randrange(1, request_id + 1)))


def _count(finals: Counter[int], peer: RawPeer) -> None:
    request_id, reply = peer.receive()
    assert isinstance(reply, ExpertsFetched | ErrorReply | TokensGenerated)
    finals[request_id] += is_final(reply)
