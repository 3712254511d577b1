"""The queue before the model: in order, limited, and without those who left."""

from __future__ import annotations

import threading

import pytest

from services.worker.engine import Job
from services.worker.request_queue import RequestQueue, Ticket
from shared.errors import ErrorCode, ServiceError
from shared.protocol.codec import decode
from shared.protocol.messages import ErrorReply, Generate, TokensGenerated
from shared.transport.request import Request

PATIENCE_S = 10.0


class Client:
    """Makes tickets of one token each, and notes what becomes of them."""

    def __init__(self) -> None:
        self.replies: dict[int, object] = {}

    def ticket(self, number: int) -> Ticket:
        return Ticket(Request(Generate((number,), 1), b"peer", number, self._post), Job((number,), 1))

    def _post(self, request: Request, body: bytes, final: bool) -> bool:
        assert final
        self.replies[request.request_id] = decode(body)
        return True


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def queue() -> RequestQueue:
    return RequestQueue(3)


def filled(queue: RequestQueue, client: Client) -> list[Ticket]:
    tickets = [client.ticket(number) for number in (1, 2, 3)]
    for ticket in tickets:
        queue.put(ticket)
    return tickets


def test_first_in_first_out(queue: RequestQueue, client: Client) -> None:
    tickets = filled(queue, client)
    assert [queue.take(0.0) for _ in range(4)] == [*tickets, None]


def test_a_full_queue_says_so(queue: RequestQueue, client: Client) -> None:
    filled(queue, client)
    with pytest.raises(ServiceError, match=r"3 requests wait already \(worker.max_queue\)") as caught:
        queue.put(client.ticket(4))
    assert caught.value.code is ErrorCode.NO_CAPACITY


def test_who_left_gives_the_place_to_who_comes(queue: RequestQueue, client: Client) -> None:
    first, second, third = filled(queue, client)
    second.request.cancelled.set()
    assert queue.num_waiting == 2
    fourth = client.ticket(4)
    queue.put(fourth)
    (aborted,) = client.replies.values()
    assert isinstance(aborted, TokensGenerated)
    assert (aborted.finish_reason, aborted.prompt_tokens, aborted.completion_tokens) == ("abort", 1, 0)
    assert [queue.take(0.0) for _ in range(3)] == [first, third, fourth]
    assert queue.num_cancelled == 1


def test_who_left_is_not_taken(queue: RequestQueue, client: Client) -> None:
    for ticket in filled(queue, client)[:2]:
        ticket.request.cancelled.set()
    taken = queue.take(0.0)
    assert taken is not None
    assert taken.request.request_id == 3
    assert sorted(client.replies) == [1, 2]


def test_a_ticket_ends_the_waiting_for_one(queue: RequestQueue, client: Client) -> None:
    taken: list[Ticket | None] = []
    taker = threading.Thread(target=lambda: taken.append(queue.take(PATIENCE_S)))
    taker.start()
    ticket = client.ticket(1)
    queue.put(ticket)
    taker.join(PATIENCE_S / 2)
    assert taken == [ticket]


def test_all_fail_but_who_left(queue: RequestQueue, client: Client) -> None:
    filled(queue, client)[0].request.cancelled.set()
    assert queue.fail_all(ErrorCode.PEER_LOST, "gone") == 2
    assert isinstance(client.replies.pop(1), TokensGenerated)
    assert client.replies == dict.fromkeys((2, 3), ErrorReply("peer_lost", "gone"))
    assert queue.take(0.0) is None
