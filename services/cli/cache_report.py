"""What answers cost: the expert cache's part, as the difference of two snapshots of expertd's counters, and the speed.

Pure. The counters belong to the whole service: with other clients at work they count those too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from shared.protocol.messages import StatsSnapshot, TextChunk
from shared.readable import counted, readable_bytes


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Expert uses of one answer; `hits` needed no message, `late_hits` were being read already."""

    hits: int
    late_hits: int
    misses: int
    evictions: int
    bytes_read: int

    @property
    def hit_rate(self) -> float:
        uses = self.hits + self.late_hits + self.misses
        return self.hits / uses if uses else 1.0

    def __add__(self, other: CacheReport) -> CacheReport:
        return CacheReport(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def line(self) -> str:
        return (
            f"cache: {self.hits:,} hits ({self.hit_rate:.1%}), {self.late_hits:,} late hits, {self.misses:,} misses, "
            f"{self.evictions:,} evictions, {readable_bytes(self.bytes_read)} read"
        )


def cache_report(before: StatsSnapshot | None, after: StatsSnapshot | None) -> CacheReport | None:
    """None if a snapshot is missing or expertd was restarted in between."""
    if before is None or after is None or before.boot_id != after.boot_id:
        return None

    def gained(key: str) -> int:
        return int(_value(after.values, key) - _value(before.values, key))

    late, misses = gained("late_hits"), gained("misses")
    return CacheReport(gained("uses") - misses - late, late, misses, gained("evictions"), gained("bytes_read"))


def _value(values: Mapping[str, float], key: str) -> float:
    return values.get(key, 0.0)


def tokens_per_second(last: TextChunk) -> float:
    """Decode speed of an answer: the tokens after the first over the time after the first."""
    seconds = last.elapsed_s - last.ttft_s
    return (last.completion_tokens - 1) / seconds if last.completion_tokens > 1 and seconds > 0 else 0.0


def speed_line(last: TextChunk) -> str:
    speed = tokens_per_second(last)
    return (
        f"{counted(last.completion_tokens, 'token')} in {last.elapsed_s:.2f} s ("
        + (f"{speed:.1f} tokens/s, " if speed else "")
        + f"the first after {last.ttft_s:.2f} s), prompt {counted(last.prompt_tokens, 'token')}, "
        f"ended by {last.finish_reason}"
    )


@dataclass(slots=True)
class SessionCost:
    """The sum over the answers of a session. `max_context` in tokens."""

    max_context: int
    _answers: int = 0
    _prompt_tokens: int = 0
    _cached_tokens: int = 0
    _completion_tokens: int = 0
    _seconds: float = 0.0
    _context_tokens: int = 0
    _cache: CacheReport = CacheReport(0, 0, 0, 0, 0)

    def add(self, last: TextChunk, cache: CacheReport | None) -> None:
        self._answers += 1
        self._prompt_tokens += last.prompt_tokens
        self._cached_tokens += last.cached_tokens
        self._completion_tokens += last.completion_tokens
        self._seconds += last.elapsed_s
        self._context_tokens = last.prompt_tokens + last.completion_tokens
        if cache is not None:
            self._cache += cache

    def lines(self) -> list[str]:
        if not self._answers:
            return []
        return [
            f"session: {counted(self._answers, 'answer')} in {self._seconds:.1f} s, "
            f"{counted(self._prompt_tokens, 'token')} read "
            f"({self._cached_tokens:,} of them remembered), {self._completion_tokens:,} written",
            f"session's {self._cache.line()}",
            f"context: {self._context_tokens:,} of {self.max_context:,} tokens",
        ]
