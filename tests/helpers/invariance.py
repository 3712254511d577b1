"""What must never change one bit of what the model says, through the real services.

The ids and, for every token, the log-probabilities of the whole vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.services import ROOT, generate, running, worker_client, write_config
from shared.protocol.messages import Generate, TokensGenerated

TINY = ROOT / "tests" / "golden" / "tiny-a"
SLOT_BYTES = 28672
ALL = 7 * 16 * SLOT_BYTES
LEAST = 8 * SLOT_BYTES
VOCAB = 512
REQUESTS = (
    Generate(tuple(range(5, 100)), 20, temperature=0.0, top_logprobs=VOCAB),
    Generate((9, 8, 7), 60, temperature=0.9, top_p=0.95, seed=11, top_logprobs=VOCAB),
)

Answers = list[list[tuple[Any, ...]]]


def answers(tmp_path: Path, **sections: dict[str, object]) -> Answers:
    """What the services say to `REQUESTS`, a tuple for every token."""
    config = write_config(tmp_path / "icebox.toml", TINY, **sections)
    with running(config, "expertd", "worker") as stack, worker_client(stack.config) as client:
        return [[_content(reply) for reply in generate(client, request)] for request in REQUESTS]


def check_whole(everything: Answers) -> None:
    assert [len(replies) for replies in everything] == [20, 60]
    assert all(len(reply[4]) == VOCAB for replies in everything for reply in replies)


def _content(reply: TokensGenerated) -> tuple[Any, ...]:
    return reply.token_ids, reply.finish_reason, reply.logprobs, reply.top_ids, reply.top_logprobs
