"""What the front counts: cumulative over the life of the process, gauges apart. Touched by the event loop only."""

from __future__ import annotations

from dataclasses import dataclass

from services.front.answer import Answer


@dataclass(slots=True)
class FrontCounters:
    """Times in seconds. `ttft_*` is the time from a request's arrival to its first token, queueing included.

    A refused request found the queue full. A repaired answer is complete, but departs from the vendor's format.
    """

    requests_done: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    requests_refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft_seconds: float = 0.0
    ttft_count: int = 0
    answers_repaired: int = 0

    def count(self, answer: Answer, finish_reason: str) -> None:
        """An answer that came to its end, cancelled ones included."""
        usage = answer.usage
        self.requests_cancelled += finish_reason == "abort"
        self.requests_done += finish_reason != "abort"
        self.prompt_tokens += usage.prompt_tokens
        self.generated_tokens += usage.completion_tokens
        self.ttft_count += usage.completion_tokens > 0
        self.ttft_seconds += usage.ttft_s
        self.answers_repaired += finish_reason in ("stop", "tool_calls") and not answer.is_well_formed
