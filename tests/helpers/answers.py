"""Made-up answers as the events that the front's core gives to the HTTP dialects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from services.front.generation import (
    Event,
    Finished,
    Queued,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    Usage,
)

USAGE = Usage(prompt_tokens=10, completion_tokens=6, cached_tokens=4, reasoning_tokens=2)
ARGUMENTS = json.dumps({"city": "Zürich", "days": 2}, ensure_ascii=False)


class Answer(NamedTuple):
    """`parts` are ("text" or "reasoning" or "call", what it says), neighbours of different kinds, calls excepted."""

    parts: Sequence[tuple[str, str]]
    events: list[Event]


def events_of(
    parts: Sequence[tuple[str, str]], cuts: Sequence[int] = (), finished: Finished | None = None
) -> list[Event]:
    """The stream of an answer; every part is cut at these places. Call n has the id "call_n" and the name "f<n>"."""
    events: list[Event] = [Queued(2), Started(10, 4)]
    num_calls = 0
    for kind, said in parts:
        pieces = [piece for a, b in zip([0, *cuts], [*cuts, None], strict=True) if (piece := said[a:b])]
        if kind == "text":
            events += map(TextDelta, pieces)
        elif kind == "reasoning":
            events += map(ReasoningDelta, pieces)
        else:
            events.append(ToolCallDelta(num_calls, pieces[0], f"call_{num_calls}", f"f{num_calls}"))
            events += [ToolCallDelta(num_calls, piece) for piece in pieces[1:]]
            events.append(ToolCallDone(num_calls, said))
            num_calls += 1
    return [*events, finished or Finished("tool_calls" if num_calls else "stop", USAGE)]


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    parts: list[tuple[str, str]] = []
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=5)):
        said = draw(st.sampled_from([ARGUMENTS, "{}"]) if kind == "call" else st.text(min_size=1, max_size=12))
        if parts and parts[-1][0] == kind != "call":
            continue
        parts.append((kind, said))
    cuts = sorted(draw(st.lists(st.integers(0, 40), max_size=6)))
    return Answer(parts, events_of(parts, cuts))
