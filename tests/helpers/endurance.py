"""Much decoding in the smallest pool while requests are cancelled, clients vanish, files break and services are killed.

Every wait has its limit, what is answered is what a pool with everything in it answers, and nothing grows.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import RecordLayout, least_slots
from shared.errors import ErrorCode, PeerLost
from shared.protocol.messages import ErrorReply, Generate
from shared.transport.client import BlockingClient

from .gpu import eventually
from .services import Stack, generate, no_shared_memory_left, running, token_ids, worker_client, write_config

QUIET_S = 60.0
"""Between two replies; more is a hang."""
GROWTH = 32 << 20
"""Bytes that a process may have of its own besides what it had when it was warm: allocators keep some."""
POOL_GROWTH = 128 << 20
"""The same for the memory that the pool is in, of all services together."""
KILLS = (["expertd"], ["worker"], ["expertd"], ["expertd", "worker"])
"""Of the long run: what is killed between rounds."""
FATES = {"completed": 8, "cancelled": 4, "vanished": 2, "unreadable": 1}
"""What is done to requests, and how often."""
ENDS = ("length", "abort", ErrorCode.PEER_LOST, ErrorCode.IO_ERROR)
"""How they end: each fate is met in every round."""

Mishap = Callable[[int], None]
"""Is given the request's id."""


class Seen(NamedTuple):
    """The tokens of a request, and its finish reason or the code of its error."""

    ids: list[int]
    end: str


class Footprint(NamedTuple):
    """Open descriptors of a process, and bytes of memory that it alone has and no file holds."""

    descriptors: int
    anonymous: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        (anonymous,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
        return cls(len(os.listdir(f"/proc/{pid}/fd")), anonymous)


@dataclass(frozen=True, slots=True)
class Plan:
    """`tokens` are decoded in rounds, and before each round but the first the services of one of `kills` are killed.

    The longest answer has `longest` tokens. `sections` are for the services' config. `free_bytes` is of the memory that
    the pool is in. `advance` is told of tokens as they are decoded.
    """

    tokens: int
    longest: int
    kills: Sequence[Sequence[str]]
    sections: Mapping[str, dict[str, object]] = field(default_factory=dict)
    free_bytes: Callable[[], int] = lambda: 0
    advance: Callable[[int], None] = lambda tokens: None


@no_shared_memory_left()
def endure(work: Path, checkpoint: Path, plan: Plan) -> Counter[str]:
    """How many requests ended how: by finish reason or code of the error, all of `ENDS`.

    `work` is for configs and logs. A file of the checkpoint has another size now and then.
    """
    config = ModelConfig.from_dir(checkpoint)
    slot_bytes = RecordLayout.of(config).slot_bytes
    everything = config.num_moe_layers * config.n_routed_experts * slot_bytes
    requests = _requests(config.vocab_size, plan.longest)
    with (
        _services(work / "all", checkpoint, everything, plan) as stack,
        worker_client(stack.config) as client,
    ):
        answers = [token_ids(generate(client, request)) for request in requests]
        assert stack.stop() == {"expertd": 0, "worker": 0}
    assert [len(ids) for ids in answers] == [request.max_tokens for request in requests]
    with _services(work / "least", checkpoint, least_slots(config) * slot_bytes, plan) as stack:
        shard = TensorIndex.open(checkpoint)["layers.3.ffn.experts.0.w1.weight"].file
        course = Course(stack, requests, answers, shard, plan)
        for victims in ((), *plan.kills):
            if victims:
                course.kill(*victims)
            course.round()
        assert stack.stop() == {"expertd": 0, "worker": 0}
    assert set(course.ends) == set(ENDS)
    return course.ends


@contextmanager
def _services(directory: Path, checkpoint: Path, cache_bytes: int, plan: Plan) -> Iterator[Stack]:
    directory.mkdir()
    path = write_config(directory / "icebox.toml", checkpoint, cache={"bytes": cache_bytes}, **plan.sections)
    with running(path, "expertd", "worker") as stack:
        yield stack


def _requests(vocab: int, longest: int) -> list[Generate]:
    """Prompts of one token to several segments; greedy and sampled."""
    rng = random.Random(0)
    shapes = ((1, 0.5, 0.0), (3, 1.0, 1.0), (40, 0.7, 0.7), (90, 0.5, 0.0), (200, 0.4, 1.0))
    return [
        Generate(
            tuple(rng.randrange(3, vocab) for _ in range(length)),
            int(part * longest),
            temperature=temperature,
            seed=number,
        )
        for number, (length, part, temperature) in enumerate(shapes)
    ]


class Course:
    """One client's way through it all."""

    def __init__(
        self, stack: Stack, requests: Sequence[Generate], answers: Sequence[list[int]], shard: Path, plan: Plan
    ) -> None:
        self.ends: Counter[str] = Counter()
        self._stack = stack
        self._plan = plan
        self._known = list(zip(requests, answers, strict=True))
        self._shard, self._shard_bytes = shard, shard.stat().st_size
        self._rng = random.Random(1)
        self._warm: dict[int, Footprint] = {}
        self._free: int | None = None
        self._connection = ExitStack()
        self._stack.closing.callback(self._connection.close)
        self._client = self._connect()

    def round(self) -> None:
        """One's share of the tokens; then no service has grown since it was warm."""
        tokens, free_bytes = self._plan.tokens // (1 + len(self._plan.kills)), self._plan.free_bytes
        for fate in (*FATES, "completed"):
            tokens -= self._request(fate)
        pids = [process.pid for process in self._stack.processes.values()]
        self._warm |= {pid: Footprint.of(pid) for pid in pids if pid not in self._warm}
        self._free = free_bytes() if self._free is None else self._free
        while tokens > 0:
            (fate,) = self._rng.choices(list(FATES), list(FATES.values()))
            tokens -= self._request(fate)
        for pid in pids:
            warm = self._warm[pid]
            eventually(
                lambda pid=pid, warm=warm: _fits(Footprint.of(pid), warm),
                lambda pid=pid, warm=warm: f"{warm} became {Footprint.of(pid)}",
            )
        free = self._free
        eventually(lambda: free - free_bytes() < POOL_GROWTH, lambda: f"free {free:,}, now {free_bytes():,}")

    def kill(self, *victims: str) -> None:
        """SIGKILL under load, and a new start."""

        def mishap(_: int) -> None:
            for victim in victims:
                self._stack.kill(victim)

        self._look(*self._rng.choice(self._known), 2, mishap, ErrorCode.PEER_LOST)
        self._stack.start(*victims)
        self._stack.wait_ready("expertd", "worker")
        if "worker" in victims:
            self._connection.close()
            self._client = self._connect()

    def _request(self, fate: str) -> int:
        """One that is to meet this fate; the number of its tokens."""
        message, answer = self._rng.choice(self._known)
        count: int = getattr(self, f"_{fate}")(message, answer, self._rng.randrange(len(answer) // 4))
        self._plan.advance(count)
        return count

    def _completed(self, message: Generate, answer: list[int], _: int) -> int:
        return self._look(message, answer, -1, lambda _: None, "length")

    def _cancelled(self, message: Generate, answer: list[int], after: int) -> int:
        return self._look(message, answer, after, self._client.cancel, "abort")

    def _vanished(self, message: Generate, answer: list[int], after: int) -> int:
        with worker_client(self._stack.config) as other:
            return self._look(message, answer, after, lambda _: other.close(), ErrorCode.PEER_LOST, other)

    def _unreadable(self, message: Generate, answer: list[int], after: int) -> int:
        """A shard has another size than before while this request runs."""

        def mishap(_: int) -> None:
            os.truncate(self._shard, self._shard_bytes + 1000)

        try:
            return self._look(message, answer, after, mishap, ErrorCode.IO_ERROR)
        finally:
            os.truncate(self._shard, self._shard_bytes)

    def _look(
        self,
        message: Generate,
        answer: list[int],
        after: int,
        mishap: Mishap,
        end: str,
        client: BlockingClient | None = None,
    ) -> int:
        """It ends like this, or whole if the mishap came too late; what was said is right. The number of tokens."""
        seen = _follow(client or self._client, message, after, mishap)
        assert seen.end in (end, "length"), seen
        assert seen.ids == (answer if seen.end == "length" else answer[: len(seen.ids)])
        self.ends[seen.end] += 1
        return len(seen.ids)

    def _connect(self) -> BlockingClient:
        return self._connection.enter_context(worker_client(self._stack.config))


def _follow(client: BlockingClient, message: Generate, after: int = -1, mishap: Mishap = lambda _: None) -> Seen:
    """To its end, whatever that is; once `after` tokens are here, the mishap happens."""
    request_id, ids = client.start(message), list[int]()
    is_due = after >= 0
    while True:
        if is_due and len(ids) >= after:
            is_due = False
            mishap(request_id)
        try:
            event = client.poll(QUIET_S)
        except PeerLost as lost:
            return Seen(ids, lost.code)
        assert event is not None, f"nothing for {QUIET_S:g} s after {len(ids)} tokens"
        if event[0] != request_id:
            continue
        reply = event[1]
        if isinstance(reply, ErrorReply):
            return Seen(ids, reply.code)
        ids += reply.token_ids
        if reply.finish_reason:
            return Seen(ids, reply.finish_reason)


def _fits(now: Footprint, warm: Footprint) -> bool:
    return now.descriptors <= warm.descriptors and now.anonymous <= warm.anonymous + GROWTH
