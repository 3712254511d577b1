"""Little stories by grammar: who, where, what was lost or found, who helped, what came of it.

A story knows its own facts, so questions about it have one right answer. Knows nothing of chats or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.words import ADJECTIVES, ANIMALS, FEELINGS, FOODS, NAMES, OBJECTS, PLACES, WEATHER, held_out


@dataclass(frozen=True, slots=True)
class Story:
    """A told story. `facts` are (question, answer sentence, the word that must be in it)."""

    text: str
    facts: tuple[tuple[str, str, str], ...]
    hero: str
    animal: str


def tell(rng: Random, animal: str | None = None, *, evaluation: bool = False) -> Story:
    """A story of about 100 words; its content is held out exactly if it is for evaluation."""
    while True:
        parts = _Parts.draw(rng, animal)
        if held_out(parts.content) == evaluation:
            return _told(rng, parts)


@dataclass(frozen=True, slots=True)
class _Parts:
    hero: str
    animal: str
    home: str
    place: str
    object: str
    adjective: str
    helper: str
    helper_animal: str
    food: str
    weather: str
    feeling: str

    @classmethod
    def draw(cls, rng: Random, animal: str | None) -> _Parts:
        hero, helper = rng.sample(NAMES, 2)
        home, place = rng.sample(PLACES, 2)
        kind = animal or rng.choice(ANIMALS)
        other = rng.choice([a for a in ANIMALS if a != kind])
        words = (rng.choice(group) for group in (FOODS, WEATHER, FEELINGS))
        return cls(hero, kind, home, place, rng.choice(OBJECTS), rng.choice(ADJECTIVES), helper, other, *words)

    @property
    def content(self) -> str:
        return f"{self.hero} {self.animal} {self.place} {self.object}"


def article(word: str) -> str:
    """The word with its indefinite article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _told(rng: Random, p: _Parts) -> Story:
    plot = rng.choice((_lost, _found, _feast))
    text, facts = plot(rng, p)
    common = (
        (f"Where did {p.hero} live?", f"{p.hero} lived near the {p.home}.", p.home),
        (f"What kind of animal was {p.hero}?", f"{p.hero} was {article(p.animal)}.", p.animal),
    )
    opening = rng.choice(
        (
            f"Once there was {article(p.animal)} named {p.hero} who lived near the {p.home}.",
            f"Near the {p.home} lived {article(p.animal)} called {p.hero}.",
            f"{p.hero} was {article(p.animal)} and lived near the {p.home}.",
        )
    )
    return Story(f"{opening} {text}", (*common, *facts), p.hero, p.animal)


Plot = Callable[[Random, _Parts], tuple[str, tuple[tuple[str, str, str], ...]]]


def _lost(rng: Random, p: _Parts) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    missed = rng.choice(
        (
            f"One morning {p.hero} could not find the {p.adjective} {p.object}.",
            f"One day the {p.adjective} {p.object} of {p.hero} was gone.",
        )
    )
    search = rng.choice(
        (
            f"{p.hero} looked under the bed and behind the stove, but it was not there.",
            f"{p.hero} asked the neighbours, but nobody had seen it.",
            f"{p.hero} searched the whole house until noon.",
        )
    )
    met = f"Then {p.helper} the {p.helper_animal} came by and said: " + rng.choice(
        ("I will help you.", "Let us look together.", "Two see more than one.")
    )
    walk = rng.choice(
        (
            f"They walked through {p.weather} to the {p.place}.",
            f"In the {p.weather} they went to the {p.place}.",
        )
    )
    end = (
        f"There lay the {p.object}. {p.hero} was {p.feeling} and "
        + rng.choice(("thanked", "hugged", "smiled at"))
        + f" {p.helper}. In the evening they ate {p.food} together."
    )
    facts = (
        (f"What did {p.hero} lose?", f"{p.hero} lost the {p.adjective} {p.object}.", p.object),
        (f"Who helped {p.hero}?", f"{p.helper} helped {p.hero}.", p.helper),
        (f"Where was the {p.object}?", f"The {p.object} was at the {p.place}.", p.place),
        ("What did they eat?", f"They ate {p.food}.", p.food),
    )
    return " ".join((missed, search, met, walk, end)), facts


def _found(rng: Random, p: _Parts) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    start = rng.choice(
        (
            f"After the {p.weather} {p.hero} went for a walk to the {p.place}.",
            f"On a day of {p.weather} {p.hero} walked to the {p.place}.",
        )
    )
    find = rng.choice(
        (
            f"There {p.hero} found {article(p.adjective)} {p.object} in the grass.",
            f"Under a tree {p.hero} found {article(p.adjective)} {p.object}.",
        )
    )
    wonder = rng.choice(
        (
            "Whose could it be?",
            f"It looked as if somebody had hidden it there. {p.hero} was {p.feeling}.",
            f"{p.hero} turned it around and around and felt {p.feeling}.",
        )
    )
    owner = (
        f"On the way home {p.hero} met {p.helper} the {p.helper_animal}, who was crying. The {p.object} belonged to "
        f"{p.helper}. " + rng.choice((f"{p.hero} gave it back at once.", f"So {p.hero} gave it back."))
    )
    end = f"{p.helper} gave {p.hero} some {p.food}, and they became friends."
    facts = (
        (f"What did {p.hero} find?", f"{p.hero} found {article(p.adjective)} {p.object}.", p.object),
        (f"Where did {p.hero} find it?", f"{p.hero} found it at the {p.place}.", p.place),
        (f"Who owned the {p.object}?", f"{p.helper} owned the {p.object}.", p.helper),
        (f"What did {p.helper} give {p.hero}?", f"{p.helper} gave {p.hero} some {p.food}.", p.food),
    )
    return " ".join((start, find, wonder, owner, end)), facts


def _feast(rng: Random, p: _Parts) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    plan = rng.choice(
        (
            f"{p.hero} wanted to give a feast with {p.food} at the {p.place}.",
            f"One day {p.hero} planned a feast at the {p.place}, with {p.food} for everybody.",
        )
    )
    trouble = rng.choice(
        (
            f"But the {p.weather} came, and all the guests were {p.feeling}.",
            f"But there was {p.weather} all day, and {p.hero} became {p.feeling}.",
        )
    )
    rescue = f"Then {p.helper} the {p.helper_animal} brought {article(p.adjective)} {p.object} " + rng.choice(
        ("and began to sing.", "and everybody laughed.", "and had an idea.")
    )
    end = rng.choice(
        (
            "They danced until the moon came up, and nobody went home early.",
            f"In the end it was the best feast that the {p.place} had ever seen.",
        )
    )
    facts = (
        (f"Where was the feast of {p.hero}?", f"The feast was at the {p.place}.", p.place),
        ("What was there to eat?", f"There was {p.food} to eat.", p.food),
        (f"What did {p.helper} bring?", f"{p.helper} brought {article(p.adjective)} {p.object}.", p.object),
        (f"Who brought the {p.object}?", f"{p.helper} brought the {p.object}.", p.helper),
    )
    return " ".join((plan, trouble, rescue, end)), facts
