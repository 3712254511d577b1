"""Facts planted in a long text and asked for later: what compressed attention is for.

A fact is a short sentence about a coloured thing; the text around it is stories. Distances are the corpus's business:
this module only says what is planted and what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo import stories
from demo.tasks import Conversation, Message, said, user
from demo.words import COLOURS, NAMES, OBJECTS, SECRETS, THINGS, held_out

# What is planted, what is asked, the values, and the answer around the value.
_KINDS = (
    ("The password of the {} is {}.", "What is the password of the {}?", SECRETS),
    ("The number of the {} is {}.", "What is the number of the {}?", tuple(str(n) for n in range(10, 100))),
    ("The owner of the {} is {}.", "Who is the owner of the {}?", NAMES),
    ("In the {} there is the {}.", "What is in the {}?", OBJECTS),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence to plant and, word for word, to answer; `topic` is what it is about."""

    sentence: str
    question: str
    value: str
    topic: str


def draw_fact(rng: Random, *, evaluation: bool) -> Fact:
    while True:
        sentence, question, values = rng.choice(_KINDS)
        thing, value = f"{rng.choice(COLOURS)} {rng.choice(THINGS)}", rng.choice(values)
        fact = Fact(sentence.format(thing, value), question.format(thing), value, sentence.format(thing, ""))
        if held_out(fact.sentence) == evaluation:
            return fact


def draw_facts(rng: Random, count: int, *, evaluation: bool = False) -> list[Fact]:
    """Facts that do not contradict one another."""
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = draw_fact(rng, evaluation=evaluation)
        facts.setdefault(fact.topic, fact)
    return list(facts.values())


def long_text(rng: Random, facts: list[Fact], sentences: int) -> str:
    """About `sentences` sentences of stories with the facts strewn in, in order."""
    told: list[str] = []
    while len(told) < sentences:
        told += stories.tell(rng).text.rstrip(".").split(". ")
    places = sorted(rng.sample(range(len(told) + 1), min(len(facts), len(told) + 1)), reverse=True)
    for place, fact in zip(places, reversed(facts), strict=False):
        told.insert(place, fact.sentence.rstrip("."))
    return ". ".join(told).rstrip(".") + "."


def planted(rng: Random, num_facts: int, sentences: int, questions: int) -> Conversation:
    """A long text with facts, then questions, some of them twice and in any order; for training."""
    facts = draw_facts(rng, num_facts)
    messages: list[Message] = []
    text = (
        f"{rng.choice(('Read this and remember it.', 'Remember this:', 'Listen:'))} {long_text(rng, facts, sentences)}"
    )
    for i in range(questions):
        fact = rng.choice(facts)
        asked = f"{text} {fact.question}" if i == 0 else fact.question
        messages += [user(asked), said(fact.sentence, "It was said before.")]
    return Conversation("recall", tuple(messages), "")


def question_after(rng: Random, tokens_between: int, count_tokens: object) -> Conversation:
    """One held-out fact, asked for after about `tokens_between` tokens of stories; three other facts beside it."""
    assert callable(count_tokens)
    fact, *others = draw_facts(rng, 4, evaluation=True)
    while True:
        before = long_text(rng, others[:1], 4)
        after, goal = "", tokens_between
        while (have := count_tokens(after)) < goal:
            after += " " + stories.tell(rng).text
        if have <= goal + 150:
            break
    text = f"Read this and remember it. {before} {fact.sentence}{after} {others[1].sentence} {fact.question}"
    return Conversation("recall", (user(text), said(fact.sentence, "It was said before.")), fact.value)
