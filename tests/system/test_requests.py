"""The worker's requests through real processes: ends, cancel, queue, refusals, and that hits cost no message."""

import struct

import pytest
import zmq
from helpers.front import published
from helpers.services import ROOT, generate, running, token_ids, worker_client, write_config

from shared.errors import ErrorCode, ServiceError
from shared.protocol.codec import decode
from shared.protocol.messages import Cancel, ErrorReply, Generate, OpenPool, Ping, TokensGenerated

TINY = ROOT / "tests" / "golden" / "tiny-a"
PROMPT = (5, 6, 7)

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    directory = tmp_path_factory.mktemp("requests")
    config = write_config(
        directory / "icebox.toml", TINY, worker={"max_queue": 2}, cache={"bytes": "8 MiB"}, model={"max_context": 400}
    )
    with running(config, "expertd", "worker") as services:
        yield services


@pytest.fixture
def client(stack):
    with worker_client(stack.config) as connected:
        yield connected


def test_ends_by_length_with_counts(client):
    replies = generate(client, Generate(PROMPT, 12, temperature=0.0))
    assert len(token_ids(replies)) == 12
    last = replies[-1]
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", 3, 12)
    assert 0 < last.ttft_s <= last.elapsed_s


def test_ends_at_a_stop_id_which_is_not_sent(client):
    free = token_ids(generate(client, Generate(PROMPT, 12, temperature=0.0)))
    stopped = generate(client, Generate(PROMPT, 12, temperature=0.0, stop_ids=(free[5],)))
    assert stopped[-1].finish_reason == "stop"
    assert token_ids(stopped) == free[: free.index(free[5])]


def test_ends_where_the_context_ends(client):
    replies = generate(client, Generate(tuple(range(2, 397)), 50, temperature=0.0))
    assert replies[-1].finish_reason == "length"
    assert len(token_ids(replies)) == 5


def test_a_request_leaves_nothing_for_the_next(client):
    alone = token_ids(generate(client, Generate(PROMPT, 20, temperature=0.0)))
    generate(client, Generate(tuple(range(2, 300)), 5, temperature=0.0))
    assert token_ids(generate(client, Generate(PROMPT, 20, temperature=0.0))) == alone


def test_the_same_seed_gives_the_same_ids(client):
    def ids(seed: int) -> list[int]:
        return token_ids(generate(client, Generate(PROMPT, 20, temperature=1.0, seed=seed)))

    assert ids(3) == ids(3) != ids(4)


def test_cancel_ends_within_a_step_and_the_next_request_works(client):
    request_id = client.start(Generate(PROMPT, 300, temperature=0.0))
    first = client.poll(20.0)
    assert first is not None
    client.cancel(request_id)
    replies: list[TokensGenerated] = [first[1]]
    while not replies[-1].finish_reason:
        replies.append(client.poll(20.0)[1])
    assert replies[-1].finish_reason == "abort"
    assert replies[-1].completion_tokens < 300
    assert len(token_ids(generate(client, Generate(PROMPT, 3)))) == 3


def test_cancel_of_an_unknown_request_is_nothing(client):
    client.send(Cancel(987654321))
    assert len(token_ids(generate(client, Generate(PROMPT, 3)))) == 3


def test_a_vanished_client_cancels_its_request(stack, client):
    with worker_client(stack.config) as other:
        other.start(Generate(PROMPT, 390, temperature=0.0))
        assert other.poll(20.0) is not None
    before = published(stack, "worker")["requests_cancelled"]
    assert len(token_ids(generate(client, Generate(PROMPT, 3)))) == 3
    assert published(stack, "worker")["requests_cancelled"] >= before
    assert published(stack, "worker")["requests_running"] == 0


def test_a_full_queue_refuses_and_what_waits_is_served_in_turn(client):
    running_id, *waiting = [client.start(Generate(PROMPT, 60, temperature=0.0))]
    assert client.poll(20.0)[0] == running_id
    waiting = [client.start(Generate(PROMPT, 2, temperature=0.0)) for _ in range(2)]
    with pytest.raises(ServiceError, match="max_queue") as refusal:
        client.finish(client.start(Generate(PROMPT, 2)), 20.0)
    assert refusal.value.code is ErrorCode.NO_CAPACITY
    ended = []
    while len(ended) < 3:
        request_id, reply = client.poll(20.0)
        if reply.finish_reason:
            ended.append(request_id)
    assert ended == [running_id, *waiting]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Generate((), 5), "empty"),
        (Generate(tuple([1] * 400), 5), "400 tokens.*max_context = 400"),
        (Generate((1, 512), 5), "512 is outside the vocabulary of 512"),
        (Generate((-1,), 5), "-1 is outside"),
        (Generate(PROMPT, 0), "max_tokens"),
        (Generate(PROMPT, 5, temperature=-1.0), "temperature"),
        (Generate(PROMPT, 5, top_p=0.0), "top_p"),
        (Generate(PROMPT, 5, top_logprobs=513), "top_logprobs"),
    ],
)
def test_what_cannot_be_generated_is_refused_by_name(client, message, words):
    with pytest.raises(ServiceError, match=words) as refusal:
        client.call(message, 10.0)
    assert refusal.value.code is ErrorCode.BAD_REQUEST


def test_garbage_on_the_socket_disturbs_nobody(stack, client):
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(stack.config.endpoint("worker"))
        not_msgpack, too_short = b"\xc1garbage", b"\x91\x10"
        raw.send_multipart([b""])
        raw.send_multipart([b"x" * 8])
        raw.send_multipart([b"a", b"b", b"c"])
        raw.send_multipart([struct.pack("<Q", 7), not_msgpack])
        raw.send_multipart([struct.pack("<Q", 8), too_short])
        answered = set()
        while raw.poll(500):
            request_id, body = raw.recv_multipart()
            reply = decode(body)
            assert isinstance(reply, ErrorReply)
            answered.add(struct.unpack("<Q", request_id)[0])
        assert {7, 8} <= answered
    assert len(token_ids(generate(client, Generate(PROMPT, 3)))) == 3


def test_the_wrong_message_is_named(client):
    with pytest.raises(ServiceError, match="OpenPool"):
        client.call(OpenPool("x", "cpu"), 5.0)
    assert client.call(Ping(), 5.0).service == "worker"


def test_a_hit_adds_no_message(stack, client):
    request = Generate(PROMPT, 30, temperature=0.0)
    generate(client, request)  # everything it needs is resident now
    before = published(stack, "worker")
    generate(client, request)
    after = published(stack, "worker")
    assert after["lookups"] - before["lookups"] >= 29 * 6 * 4, "the prompt itself was kept"
    assert after["resident"] - before["resident"] == after["lookups"] - before["lookups"]
    assert after["fetch_messages"] == before["fetch_messages"]
