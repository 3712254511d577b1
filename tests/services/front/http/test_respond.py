"""Answers as responses, in this process: clients that do not read or leave, errors before and within a stream."""

import asyncio
import contextlib

import pytest

from benchmarks.front_fuzz import application
from services.front import buffer
from services.front.answers import Answers
from services.front.generation import Conversation, GenerationRequest
from services.front.http.openai.chat import ChatEncoder
from services.front.http.respond import StreamedAnswer, WholeAnswer
from services.front.http.sse import data_frame
from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import TokensGenerated

ASKED = GenerationRequest(Conversation(({"role": "user", "content": "Hello"},)))
DONE = b"data: [DONE]\n\n"


def tokens(*ids, finish=""):
    return TokensGenerated(ids, finish, 3, len(ids), 0, 0.0, 0.0)


class Worker:
    """A link to a worker that says what the test puts into it; an exception is raised."""

    is_connected = True

    def __init__(self):
        self.replies = asyncio.Queue()
        self.has_ended = asyncio.Event()

    async def generate(self, request, take):
        try:
            while True:
                reply = await self.replies.get()
                if isinstance(reply, Exception):
                    raise reply
                if not take(reply) or reply.finish_reason:
                    return
        finally:
            self.has_ended.set()


class Client:
    """The other end of an ASGI application. It stays until it `leaves`, and reads while `is_reading`."""

    def __init__(self):
        self.status = None
        self.headers = {}
        self.body = b""
        self.leaves = asyncio.Event()
        self.is_reading = asyncio.Event()
        self.is_reading.set()

    @property
    def scope(self):
        return {"type": "http", "method": "POST", "path": "/", "headers": []}

    async def receive(self):
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]
        await self.is_reading.wait()


@contextlib.asynccontextmanager
async def talking(folder, kind=StreamedAnswer):
    """(client, worker, the running response)"""
    with application(folder) as (_, answers):
        answers.link, client = Worker(), Client()
        task = asyncio.create_task(response(answers, kind)(client.scope, client.receive, client.send))
        try:
            yield client, answers.link, task
        finally:
            client.is_reading.set()
            client.leaves.set()
            await asyncio.wait([task])
        await answers.drain(0.0)
        assert not answers.gauges["requests_running"] + answers.gauges["requests_waiting"]


def response(answers: Answers, kind):
    def make_encoder(generation):
        return ChatEncoder(generation.id, 0, "m", with_usage=False, with_logprobs=False)

    more = (data_frame, DONE) if kind is StreamedAnswer else ()
    return kind(answers, ASKED, make_encoder, *more)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_the_head_comes_before_the_first_token(tmp_path):
    async def run():
        async with talking(tmp_path) as (client, worker, task):
            await until(lambda: client.status == 200)
            assert b"queue place=0" in client.body
            worker.replies.put_nowait(tokens(68))
            worker.replies.put_nowait(tokens(finish="stop"))
            await task
            assert client.body.endswith(DONE)

    asyncio.run(run())


def test_an_answer_that_nobody_reads_ends_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer, "MAX_UNREAD", 100)

    async def run():
        async with talking(tmp_path) as (client, worker, task):
            await until(lambda: client.status == 200)
            client.is_reading.clear()
            for _ in range(300):
                worker.replies.put_nowait(tokens(68))
            async with asyncio.timeout(10):
                await worker.has_ended.wait()
            assert worker.replies.qsize() > 100
            client.is_reading.set()
            await task
            assert b"the answer comes faster than it is read" in client.body

    asyncio.run(run())


def test_an_answer_does_not_wait_for_its_reader(tmp_path):
    """The worker's turn ends with the last token, though the client has read none; later it gets all of them."""

    async def run():
        async with talking(tmp_path) as (client, worker, task):
            await until(lambda: client.status == 200)
            client.is_reading.clear()
            for _ in range(50):
                worker.replies.put_nowait(tokens(68))
            worker.replies.put_nowait(tokens(finish="stop"))
            async with asyncio.timeout(10):
                await worker.has_ended.wait()
            assert not task.done()
            client.is_reading.set()
            await task
            assert client.body.endswith(DONE)

    asyncio.run(run())


@pytest.mark.parametrize("kind", [StreamedAnswer, WholeAnswer])
def test_a_client_that_leaves_frees_the_worker(tmp_path, kind):
    async def run():
        async with talking(tmp_path, kind) as (client, worker, task):
            worker.replies.put_nowait(tokens(68))
            await until(lambda: worker.replies.empty())
            client.leaves.set()
            async with asyncio.timeout(10):
                await worker.has_ended.wait()
                await task

    asyncio.run(run())


def test_a_failure_within_a_stream_is_its_last_event(tmp_path):
    async def run():
        async with talking(tmp_path) as (client, worker, task):
            await until(lambda: client.status == 200)
            worker.replies.put_nowait(tokens(68))
            worker.replies.put_nowait(PeerLost("the worker went away"))
            await task
            *_, last, done = client.body.split(b"\n\n")[:-1]
            assert b'"code":"peer_lost"' in last
            assert done + b"\n\n" == DONE

    asyncio.run(run())


def test_a_failure_of_a_whole_answer_is_a_status(tmp_path):
    async def run():
        async with talking(tmp_path, WholeAnswer) as (client, worker, task):
            worker.replies.put_nowait(ServiceError(ErrorCode.IO_ERROR, "shard 3: gone"))
            with pytest.raises(ServiceError, match="shard 3: gone"):
                await task
            assert client.status is None

    asyncio.run(run())
