"""Cache size, policy, prefetch and readers never change one bit of what the model says.

Through the real services: the ids and, for every token, the log-probabilities of the whole vocabulary.
"""

import pytest
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

pytestmark = pytest.mark.system


def answers(tmp_path, **sections) -> list[list[tuple]]:
    config = write_config(tmp_path / "icebox.toml", TINY, **sections)
    with running(config, "expertd", "worker") as stack, worker_client(stack.config) as client:
        return [[_content(reply) for reply in generate(client, request)] for request in REQUESTS]


def _content(reply: TokensGenerated) -> tuple:
    return reply.token_ids, reply.finish_reason, reply.logprobs, reply.top_ids, reply.top_logprobs


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[list[tuple]]:
    everything = answers(tmp_path_factory.mktemp("all"), cache={"bytes": ALL, "policy": "lfu"})
    assert [len(replies) for replies in everything] == [20, 60]
    assert all(len(reply[4]) == VOCAB for replies in everything for reply in replies)
    return everything


@pytest.mark.parametrize(
    "sections",
    [
        {"cache": {"bytes": ALL // 2, "policy": "lfu"}, "reader": {"threads": 1}},
        {"cache": {"bytes": ALL // 2, "policy": "lru"}, "reader": {"threads": 8}, "prefetch": {"hash_layers": False}},
        {"cache": {"bytes": LEAST, "policy": "lfu"}, "reader": {"threads": 8}},
        {"cache": {"bytes": LEAST, "policy": "lfu-aged"}, "reader": {"threads": 1}},
        {"cache": {"bytes": LEAST, "policy": "lru"}, "prefetch": {"hash_layers": False}},
        {"cache": {"bytes": ALL // 3, "policy": "lfu-aged"}, "reader": {"direct": False}},
    ],
    ids=lambda s: "-".join(str(v) for keys in s.values() for v in keys.values()),
)
def test_the_same_bits(tmp_path, expected, sections):
    assert answers(tmp_path, **sections) == expected
