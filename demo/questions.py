"""The 200 held-out questions of the evaluation, and the judge of their answers.

Seeded apart from training, and drawn only from contents that training never saw (`words.held_out`); small talk is the
exception: its few phrases are all learned. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo import recall, tasks
from demo.tasks import Conversation
from services.front.chat.strict import MalformedCompletion, parse_strict

SEED = "evaluation 1"


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation whose last message is the right answer, under the name of its row in the table."""

    category: str
    conversation: Conversation


def _thinking_talk(rng: Random) -> Conversation:
    return tasks.with_thinking(tasks.story_questions(rng, evaluation=True))


def questions(count_tokens: Callable[[str], int], share: float = 1.0) -> list[Question]:
    """All of them, or the first `share` of every category."""

    def far(low: int, high: int) -> Callable[[Random], Conversation]:
        return lambda rng: recall.question_after(rng, rng.randrange(low, high), count_tokens)

    kinds: tuple[tuple[str, int, Callable[[Random], Conversation]], ...] = (
        ("arithmetic", 25, lambda rng: tasks.arithmetic(rng, evaluation=True, thinking=False)),
        ("arithmetic, thinking", 25, lambda rng: tasks.arithmetic(rng, evaluation=True, thinking=True)),
        ("recall, 100-500 tokens", 20, far(100, 500)),
        ("recall, 500-1,500 tokens", 20, far(500, 1500)),
        ("recall, 1,500-3,000 tokens", 20, far(1500, 2850)),
        ("story questions", 25, lambda rng: tasks.story_questions(rng, evaluation=True)),
        ("story questions, thinking", 5, _thinking_talk),
        ("tool call", 20, lambda rng: tasks.tool_call(rng, evaluation=True)),
        ("name after some turns", 20, lambda rng: tasks.remembered_name(rng, evaluation=True)),
        ("letters", 10, lambda rng: tasks.letters(rng, evaluation=True)),
        ("small talk (seen phrases)", 10, lambda rng: tasks.small_talk(rng, evaluation=True)),
    )
    asked = []
    for category, count, draw in kinds:
        rng = Random(f"{SEED} {category}")
        asked += [Question(category, draw(rng)) for _ in range(count)][: max(1, round(count * share))]
    return asked


@dataclass(frozen=True, slots=True)
class Verdict:
    """`right`: the answer holds what it must; `well_formed`: it keeps to the chat format to the letter."""

    right: bool
    well_formed: bool


def judge(conversation: Conversation, completion: str) -> Verdict:
    """`completion`: the model's text with its control tokens, end mark included."""
    try:
        answer = parse_strict(completion, thinking=conversation.thinking)
    except MalformedCompletion:
        return Verdict(right=False, well_formed=False)
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    return Verdict(is_right(conversation, answer.content, calls), well_formed=True)


def is_right(conversation: Conversation, content: str, calls: list[tuple[str, object]]) -> bool:
    """Whether an answer that was taken apart holds what it must; `calls` are names and arguments."""
    if conversation.call is None:
        return conversation.expected in content and not calls
    return calls == [conversation.call]


def table(verdicts: dict[str, list[Verdict]]) -> str:
    """Shares by category and over all, as Markdown."""
    lines = ["| questions | asked | right | well-formed |", "|---|---|---|---|"]
    rows = [*verdicts.items(), ("all", [v for of_kind in verdicts.values() for v in of_kind])]
    for category, given in rows:
        right, formed = (sum(getattr(v, key) for v in given) / len(given) for key in ("right", "well_formed"))
        lines.append(f"| {category} | {len(given)} | {right:.1%} | {formed:.1%} |")
    return "\n".join(lines)


def summary(verdicts: dict[str, list[Verdict]]) -> dict[str, dict[str, int]]:
    """How many of every category were asked, right and well-formed."""
    return {
        category: {
            "asked": len(given),
            "right": sum(v.right for v in given),
            "well_formed": sum(v.well_formed for v in given),
        }
        for category, given in verdicts.items()
    }
