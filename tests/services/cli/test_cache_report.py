import pytest

from services.cli.cache_report import CacheReport, SessionCost, cache_report, speed_line, tokens_per_second
from shared.protocol.messages import StatsSnapshot, TextChunk


def snapshot(boot_id="b", **values):
    return StatsSnapshot("expertd", boot_id, 0.0, {key: float(value) for key, value in values.items()}, {})


BEFORE = snapshot(uses=100, misses=10, late_hits=5, evictions=3, bytes_read=1000)
AFTER = snapshot(uses=200, misses=20, late_hits=7, evictions=9, bytes_read=3 * 2**20 + 1000)


def chunk(tokens, ttft_s, elapsed_s):
    return TextChunk("", "", "", "stop", 7, tokens, 0, ttft_s, elapsed_s)


def test_difference_of_two_snapshots():
    report = cache_report(BEFORE, AFTER)
    assert report == CacheReport(hits=88, late_hits=2, misses=10, evictions=6, bytes_read=3 * 2**20)
    assert report.hit_rate == 0.88
    assert report.line() == "cache: 88 hits (88.0%), 2 late hits, 10 misses, 6 evictions, 3.0 MiB read"


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, AFTER), (BEFORE, None), (BEFORE, snapshot("other", uses=200))],
    ids=["first", "last", "boot"],
)
def test_nothing_to_compare(before, after):
    assert cache_report(before, after) is None


def test_an_answer_without_experts_missed_nothing():
    assert cache_report(BEFORE, BEFORE) == CacheReport(0, 0, 0, 0, 0)
    assert CacheReport(0, 0, 0, 0, 0).hit_rate == 1.0


@pytest.mark.parametrize(
    ("last", "speed"), [(chunk(11, 1.0, 3.0), 5.0), (chunk(1, 1.0, 3.0), 0.0), (chunk(0, 0.0, 0.0), 0.0)]
)
def test_decode_speed_leaves_the_first_token_out(last, speed):
    assert tokens_per_second(last) == speed


def test_speed_line():
    assert speed_line(chunk(11, 1.0, 3.0)) == (
        "11 tokens in 3.00 s (5.0 tokens/s, the first after 1.00 s), prompt 7 tokens, ended by stop"
    )
    assert (
        speed_line(chunk(1, 1.0, 3.0)) == "1 token in 3.00 s (the first after 1.00 s), prompt 7 tokens, ended by stop"
    )


def test_a_session_of_one_answer():
    cost = SessionCost(4096)
    cost.add(chunk(1, 1.0, 3.0), None)
    assert cost.lines()[0] == "session: 1 answer in 3.0 s, 7 tokens read (0 of them remembered), 1 written"
