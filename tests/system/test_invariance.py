"""Cache size, policy, prefetch and readers never change one bit of what the model says.

Through the real services: the ids and, for every token, the log-probabilities of the whole vocabulary.
"""

import pytest
from helpers.invariance import ALL, LEAST, Answers, answers, check_whole

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Answers:
    everything = answers(tmp_path_factory.mktemp("all"), cache={"bytes": ALL, "policy": "lfu"})
    check_whole(everything)
    return everything


@pytest.mark.parametrize(
    "sections",
    [
        {"cache": {"bytes": ALL // 2, "policy": "lfu"}, "reader": {"threads": 1}},
        {"cache": {"bytes": ALL // 2, "policy": "lru"}, "reader": {"threads": 8}, "prefetch": {"hash_layers": False}},
        {"cache": {"bytes": LEAST, "policy": "lfu"}, "reader": {"threads": 8}},
        {"cache": {"bytes": LEAST, "policy": "lfu-aged"}, "reader": {"threads": 1}},
        {"cache": {"bytes": LEAST, "policy": "lru"}, "prefetch": {"hash_layers": False, "look_ahead": False}},
        {"cache": {"bytes": ALL // 3, "policy": "lfu-aged"}, "reader": {"direct": False}},
    ],
    ids=lambda s: "-".join(str(v) for keys in s.values() for v in keys.values()),
)
def test_the_same_bits(tmp_path, expected, sections):
    assert answers(tmp_path, **sections) == expected
