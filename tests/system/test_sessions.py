"""Kept conversations through the services: the same words with and without, counted, shown, and there after a kill."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.icebox import icebox
from helpers.services import ROOT, Stack, generate, running, worker_client, write_config

from services.cli.conversation import Answer, Conversation, Sampling
from services.cli.front_client import FrontClient
from shared.protocol.messages import Generate, TextChunk, TokensGenerated
from shared.stats import StatsSubscriber

TINY = ROOT / "tests" / "golden" / "tiny-a"
DEMO = ROOT / "demo" / "checkpoint"
VOCAB = 512
WORDS = tuple(7 + i * i % 400 for i in range(400))
CACHE = {"bytes": "8 MiB"}

pytestmark = pytest.mark.system


def ask(ids: Sequence[int], boundaries: Sequence[int]) -> Generate:
    """Eight tokens drawn with a seed, with the whole vocabulary's log-probabilities."""
    return Generate(tuple(ids), 8, temperature=0.8, seed=3, top_logprobs=VOCAB, boundaries=tuple(boundaries))


# Two conversations in turns: the first begins, goes on, is asked again, and forks where it began.
REQUESTS = (
    ask(WORDS[:100], (100,)),
    ask(WORDS[300:350], (50,)),
    ask(WORDS[:160], (100, 160)),
    ask(WORDS[:160], (100, 160)),
    ask(WORDS[300:400], (50, 100)),
    ask(WORDS[:100] + WORDS[200:260], (100, 160)),
)
KEPT = (0, 0, 100, 160, 50, 100)

Replies = list[list[TokensGenerated]]


def content(replies: Replies) -> list[list[tuple[object, ...]]]:
    """Everything that reuse must not change."""
    return [
        [(r.token_ids, r.finish_reason, r.logprobs, r.top_ids, r.top_logprobs, r.prompt_tokens) for r in answer]
        for answer in replies
    ]


def cached(replies: Replies) -> list[int]:
    return [answer[-1].cached_tokens for answer in replies]


def answers(stack: Stack, requests: Sequence[Generate] = REQUESTS) -> Replies:
    with worker_client(stack.config) as client:
        return [generate(client, request) for request in requests]


@contextmanager
def worker(directory: Path, checkpoint: Path = TINY, **keys: object) -> Iterator[Stack]:
    directory.mkdir(exist_ok=True)
    config = write_config(directory / "icebox.toml", checkpoint, cache=CACHE, worker={"min_segment": 16} | keys)
    with running(config, "expertd", "worker") as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[object, ...]]]:
    with worker(tmp_path_factory.mktemp("off"), session_bytes=0) as stack:
        replies = answers(stack)
    assert cached(replies) == [0] * len(REQUESTS)
    return content(replies)


def test_the_same_words_with_reuse(tmp_path: Path, expected: list[list[tuple[object, ...]]]) -> None:
    with worker(tmp_path) as stack:
        replies = answers(stack)
        assert content(replies) == expected
        assert cached(replies) == list(KEPT)
        shown = json.loads(icebox("monitor", "--once", "--json", "--config", str(stack.config_path)).stdout)["worker"]
        assert (shown["session_hits"], shown["cached_tokens"]) == (4, sum(KEPT))
        assert 0 < shown["session_bytes"] <= shown["session_limit_bytes"]


def test_what_was_kept_outlives_a_kill(tmp_path: Path, expected: list[list[tuple[object, ...]]]) -> None:
    """And a file that was damaged meanwhile costs nothing but time."""
    with worker(tmp_path, session_dir=str(tmp_path / "kept")) as stack:
        assert content(answers(stack)) == expected
        wait_for_writes(stack, 6)
        stack.kill("worker")
        for path in sorted((tmp_path / "kept").glob("*.safetensors"))[:1]:
            path.write_bytes(b"damaged")
        stack.start("worker")
        stack.wait_ready("worker")
        replies = answers(stack)
        assert content(replies) == expected
        assert sum(cached(replies)) > sum(KEPT)
        assert "kept session not used" in stack.log("worker")


def test_another_checkpoint_of_the_same_shape_uses_nothing_of_it(tmp_path: Path) -> None:
    """Told by its files' times, since reading all weights would take minutes."""
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    for path in TINY.iterdir():
        if path.is_file() and "golden" not in path.name:
            (checkpoint / path.name).write_bytes(path.read_bytes())
    kept = str(tmp_path / "kept")
    with worker(tmp_path, checkpoint, session_dir=kept) as stack:
        answers(stack)
        assert set(stack.stop().values()) == {0}
        assert len(list((tmp_path / "kept").iterdir())) > 1, "a stop writes what waits"
    os.utime(next(checkpoint.glob("*.safetensors")))
    with worker(tmp_path, checkpoint, session_dir=kept) as stack:
        assert cached(answers(stack)) == list(KEPT)


def wait_for_writes(stack: Stack, count: int) -> None:
    """Until so many segments lie on the disk."""
    subscriber = StatsSubscriber([stack.config.endpoint("worker.stats")])
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            snapshot = subscriber.poll(5.0)
            if snapshot is not None and snapshot.values["session_disk_writes"] >= count:
                return
        raise AssertionError(f"fewer than {count} segments on the disk")
    finally:
        subscriber.close()


# --- chats with the demo model ---

QUESTIONS = ("What is 3 + 4?", "What is 12 + 30?", "What is 9 + 9?")
MIN_SEGMENT = 16

Talk = list[tuple[Answer, TextChunk]]


def converse(stack: Stack, questions: Sequence[str], think: str | None = None) -> Talk:
    """The answers to a conversation's questions, and how each ended."""
    conversation = Conversation(Sampling(max_tokens=24, temperature=0.0, think=think), "You are brief and exact.")
    client, said = FrontClient(stack.config), []
    try:
        client.connect()
        for question in questions:
            answer = Answer()
            reply = client.ask(
                conversation.request(question),
                lambda c, answer=answer: answer.add(c.text, c.reasoning, c.tool_calls_json),
                lambda: False,
            )
            conversation.keep(question, answer)
            said.append((answer, reply.last))
    finally:
        client.close()
    return said


@contextmanager
def demo(directory: Path, **keys: object) -> Iterator[Stack]:
    config = write_config(
        directory / "icebox.toml", DEMO, cache={"bytes": "16 MiB"}, model={"max_context": 2048}, worker=keys
    )
    with running(config) as stack:
        yield stack


@pytest.fixture(scope="module")
def unaided(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Talk]:
    """The conversation without reuse, answered at once and with reasoning."""
    with demo(tmp_path_factory.mktemp("off"), session_bytes=0, min_segment=MIN_SEGMENT) as stack:
        return {think: converse(stack, QUESTIONS, think) for think in (None, "on")}


def test_a_chat_reads_what_is_new_and_says_the_same(tmp_path: Path, unaided: dict[str | None, Talk]) -> None:
    """With the boundaries that the front finds, and with reasoning, which later prompts leave out."""
    with demo(tmp_path, min_segment=MIN_SEGMENT) as stack:
        for think, expected in unaided.items():
            got, before = converse(stack, QUESTIONS, think), 0
            assert [answer for answer, _ in got] == [answer for answer, _ in expected]
            for (_, last), (_, last_unaided) in zip(got, expected, strict=True):
                assert (last.prompt_tokens, last_unaided.cached_tokens) == (last_unaided.prompt_tokens, 0)
                assert last.cached_tokens >= before - MIN_SEGMENT, "all of the prompt before, but for a short end"
                before = last.prompt_tokens
        assert all(last.cached_tokens == last.prompt_tokens for _, last in converse(stack, QUESTIONS))
