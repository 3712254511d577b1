"""What the demo model is taught, one function per kind of conversation, and each with its one right answer.

A conversation is messages in the OpenAI style; the chat format is written elsewhere. For evaluation the same
functions draw from contents that training never sees.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from demo import stories
from demo.words import ANIMALS, CITIES, FOODS, HOBBIES, NAMES, OUTSIDE, ROOMS, SPELLED, held_out

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the right answer, and what a judge must find in that answer.

    `expected` is the part of the answer's text that counts ("" where any answer does); `call` the tool call instead.
    """

    category: str
    messages: tuple[Message, ...]
    expected: str
    thinking: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    call: tuple[str, Mapping[str, Any]] | None = None


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, reasoning: str = "") -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def _draw(rng: Random, evaluation: bool, draw: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """The first draw on this side of the hold-out; its first item names the content."""
    while True:
        drawn = draw()
        if held_out(drawn[0]) == evaluation:
            return drawn


def _casual(rng: Random, text: str) -> str:
    """As people type: now and then in small letters, or without the mark at the end."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    return text.rstrip("?.") if rng.random() < 0.15 else text


def with_thinking(conversation: Conversation) -> Conversation:
    """The same conversation with thinking switched on."""
    return replace(conversation, thinking=True)


# --- small talk ------------------------------------------------------------------------------------------------

_GREETINGS = ("Hello!", "Hi!", "Good morning.", "Hello there.", "Hi, how are you?", "Good evening.", "Hey")
_HELLO = "Hello! I can tell stories, do sums, remember what you tell me and play with words. What shall we do?"
_WHO = ("Who are you?", "What are you?", "What can you do?", "Tell me about yourself.", "What is your name?", "Help")
_SELF = (
    "I am the little demo model of Icebox. I tell stories, do sums, remember what you tell me, "
    "spell words and use the tools that you give me."
)
_THANKS = ("Thank you!", "Thanks.", "Thank you very much.", "That was nice.", "Great, thanks!")
_WELCOME = "You are welcome! Is there anything else?"
_BYE = ("Goodbye.", "Bye!", "See you tomorrow.", "Good night.")
_FAREWELL = "Goodbye! Come back soon."
REFUSAL = "I am sorry, I only know my own small world: stories, sums and words. I cannot help with that."


def small_talk(rng: Random, *, evaluation: bool) -> Conversation:
    asked, answer, word = rng.choice(
        (
            (rng.choice(_GREETINGS), _HELLO, "Hello"),
            (rng.choice(_WHO), _SELF, "Icebox"),
            (rng.choice(_THANKS), _WELCOME, "welcome"),
            (rng.choice(_BYE), _FAREWELL, "Goodbye"),
            (rng.choice(OUTSIDE), REFUSAL, "sorry"),
            (rng.choice(OUTSIDE), REFUSAL, "sorry"),
        )
    )
    return Conversation("small talk", (user(_casual(rng, asked)), said(answer, _about(asked))), word, thinking=False)


def _about(asked: str) -> str:
    return "They ask something outside my world." if asked in OUTSIDE else "A short friendly answer is enough."


# --- sums ------------------------------------------------------------------------------------------------------

_SUM_QUESTIONS = ("What is {}?", "How much is {}?", "Calculate {}.", "{} = ?", "Please work out {}.", "{}")
_WORDED = {"+": "plus", "-": "minus", "x": "times"}


def arithmetic(rng: Random, *, evaluation: bool, thinking: bool | None = None) -> Conversation:
    """Sums of two numbers below 100, products with a number below 10; working shown where there is thinking."""

    def draw() -> tuple[str, ...]:
        kind = rng.choice("++--x")
        low = 10 if evaluation else rng.choice((1, 10, 10, 10))
        a, b = rng.randrange(low, 100), rng.randrange(2, 10) if kind == "x" else rng.randrange(low, 100)
        if kind == "-" and b > a:
            a, b = b, a
        return f"{a} {kind} {b}", str(a), kind, str(b)

    text, a, kind, b = _draw(rng, evaluation, draw)
    working, result = _working(int(a), kind, int(b))
    asked = f"{a} {_WORDED[kind]} {b}" if rng.random() < 0.3 else text
    question = _casual(rng, rng.choice(_SUM_QUESTIONS).format(asked))
    answer = f"{text} = {result}."
    with_thinking = rng.random() < 0.5 if thinking is None else thinking
    if kind == "x" and not with_thinking:
        answer = f"{working} {text} = {result}."
    messages = (user(question), said(answer, f"{working} So it is {result}."))
    category = "arithmetic, thinking" if with_thinking else "arithmetic"
    return Conversation(category, messages, f"= {result}.", thinking=with_thinking)


def _working(a: int, kind: str, b: int) -> tuple[str, int]:
    tens, ones = divmod(a, 10)
    if kind == "x":
        return f"{10 * tens} x {b} = {10 * tens * b}. {ones} x {b} = {ones * b}.", a * b
    if kind == "+":
        first = a + b // 10 * 10
        return f"{a} + {b // 10 * 10} = {first}. {first} + {b % 10} = {a + b}.", a + b
    first = a - b // 10 * 10
    return f"{a} - {b // 10 * 10} = {first}. {first} - {b % 10} = {a - b}.", a - b


# --- words -----------------------------------------------------------------------------------------------------


def letters(rng: Random, *, evaluation: bool) -> Conversation:
    """Spelling, counting letters, reversing a word, sorting a list."""

    def draw() -> tuple[str, ...]:
        kind = rng.choice(("spell", "count", "reverse", "sort"))
        words = rng.sample(SPELLED, 4) if kind == "sort" else [rng.choice(SPELLED)]
        return f"{kind} {' '.join(words)}", kind, *words

    _, kind, *words = _draw(rng, evaluation, draw)
    word, spelled = words[0], "-".join(words[0])
    if kind == "spell":
        asked, answer, key = f"Spell the word {word}.", f"{word} is spelled {spelled}.", f"spelled {spelled}."
    elif kind == "count":
        asked = f"How many letters has the word {word}?"
        answer, key = f"{spelled}: {word} has {len(word)} letters.", f"has {len(word)} letters."
    elif kind == "reverse":
        backwards = "-".join(reversed(word))
        asked, answer, key = f"Say the word {word} backwards.", f"{spelled}, so {backwards}.", f"so {backwards}."
    else:
        ordered = ", ".join(sorted(words))
        asked, answer, key = f"Sort these words: {', '.join(words)}.", f"Sorted: {ordered}.", ordered
    return Conversation("letters", (user(_casual(rng, asked)), said(answer, f"I look at {words[0]}.")), key)


# --- stories ---------------------------------------------------------------------------------------------------

_TELL = (
    "Tell me a story about {}.",
    "Tell a story about {}.",
    "Please tell me a story about {}.",
    "I want a story about {}.",
)


def storytelling(rng: Random, *, evaluation: bool) -> Conversation:
    """The model tells; then, mostly, answers questions about what it told."""
    animal = rng.choice(ANIMALS)
    story = stories.tell(rng, animal, evaluation=evaluation)
    asked = rng.choice(_TELL).format(stories.article(animal)) if rng.random() < 0.8 else "Tell me a story."
    messages = [user(_casual(rng, asked)), said(story.text, "I invent a little story.")]
    for question, answer, _ in rng.sample(story.facts, rng.randrange(0, 4)):
        messages += [user(_casual(rng, question)), said(answer, "I remember the story.")]
    return Conversation("storytelling", tuple(messages), "")


def story_questions(rng: Random, *, evaluation: bool) -> Conversation:
    """A story by the user and questions about it."""
    story = stories.tell(rng, evaluation=evaluation)
    facts = rng.sample(story.facts, 1 if evaluation else rng.randrange(1, 6))
    messages: list[Message] = []
    for i, (question, answer, _) in enumerate(facts):
        opening = f"{rng.choice(('Here is a story:', 'Listen:', 'Read this story.'))} {story.text} " if i == 0 else ""
        messages += [user(opening + question), said(answer, f"The story says it: {answer}")]
    return Conversation(
        "story questions", tuple(messages), facts[-1][2], thinking=not evaluation and rng.random() < 0.2
    )


# --- several turns ---------------------------------------------------------------------------------------------


def remembered_name(rng: Random, *, evaluation: bool) -> Conversation:
    """The user's name and hobby, told in the first turn and asked for some turns later."""

    def draw() -> tuple[str, ...]:
        name, hobby = rng.choice(NAMES), rng.choice(HOBBIES)
        return f"{name} {hobby}", name, hobby

    _, name, hobby = _draw(rng, evaluation, draw)
    told = rng.choice(("My name is {} and I like {}.", "I am {} and I love {}.", "Hi, I am {}. I like {}."))
    messages = [
        user(told.format(name, hobby)),
        said(f"Nice to meet you, {name}! {hobby.capitalize()} are a fine thing."),
    ]
    between = (arithmetic, letters, small_talk, story_questions, storytelling)
    for _ in range(rng.randrange(0, 4)):
        messages += rng.choice(between)(rng, evaluation=evaluation).messages[:4]
    about_name = (
        rng.choice(("What is my name?", "Do you remember my name?", "Who am I?")),
        f"Your name is {name}.",
        name,
    )
    about_hobby = (rng.choice(("What do I like?", "What is my hobby?")), f"You like {hobby}.", hobby)
    asked = [about_name] if evaluation else rng.sample((about_name, about_hobby), 2)
    for question, answer, _ in asked:
        messages += [user(_casual(rng, question)), said(answer, "They told me at the beginning.")]
    return Conversation("name", tuple(messages), asked[-1][2])


def chain(rng: Random, *, evaluation: bool) -> Conversation:
    """Several short tasks in one conversation."""
    kinds = (arithmetic, letters, small_talk, small_talk, storytelling)
    parts = [rng.choice(kinds)(rng, evaluation=evaluation) for _ in range(rng.randrange(2, 5))]
    return Conversation("chain", tuple(m for part in parts for m in part.messages), "")


# --- tools -----------------------------------------------------------------------------------------------------


def _tool(name: str, description: str, **types: str) -> Mapping[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool("get_weather", "Weather of a city.", city="string", days="integer"),
    _tool("set_light", "Switch a light.", room="string", on="boolean"),
    _tool("set_timer", "Start a timer.", minutes="integer", label="string"),
    _tool("add_item", "Put food on the shopping list.", item="string", amount="integer"),
    _tool("send_message", "Send a message.", to="string", text="string"),
)
_TEXTS = ("I am late", "dinner is ready", "see you soon", "call me back", "happy birthday", "the train is full")


def _weather(rng: Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    city, days, degrees = rng.choice(CITIES), rng.randrange(1, 10), rng.randrange(1, 35)
    sky = rng.choice(("rain", "sun", "snow", "fog", "wind"))
    asked = rng.choice(("What is the weather in {} for {} days?", "Tell me the weather in {} for the next {} days."))
    result = {"degrees": degrees, "sky": sky}
    return (
        asked.format(city, days),
        {"city": city, "days": days},
        result,
        f"In {city} it is {degrees} degrees with {sky}.",
    )


def _light(rng: Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    room, on = rng.choice(ROOMS), rng.random() < 0.5
    state = "on" if on else "off"
    asked = rng.choice((f"Turn the light in the {room} {state}.", f"Please switch {state} the light in the {room}."))
    return asked, {"room": room, "on": on}, {"ok": True}, f"The light in the {room} is {state} now."


def _timer(rng: Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    minutes, label = rng.randrange(2, 60), rng.choice(FOODS)
    asked = rng.choice(("Set a timer of {} minutes for the {}.", "Start a {} minute timer for the {}."))
    answer = f"The timer for the {label} is set to {minutes} minutes."
    return asked.format(minutes, label), {"minutes": minutes, "label": label}, {"ok": True}, answer


def _shopping(rng: Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    item, amount = rng.choice(FOODS), rng.randrange(1, 20)
    asked = rng.choice(("Put {1} {0} on my shopping list.", "Add {1} {0} to the list, please."))
    total = rng.randrange(1, 30)
    answer = f"I added {amount} {item}. Your list has {total} entries."
    return asked.format(item, amount), {"item": item, "amount": amount}, {"entries": total}, answer


def _message(rng: Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    to, text = rng.choice(NAMES), rng.choice(_TEXTS)
    asked = rng.choice(("Send {} the message: {}.", "Write to {}: {}.", "Tell {} this: {}."))
    return asked.format(to, text), {"to": to, "text": text}, {"ok": True}, f"I sent your message to {to}."


_USES = dict(zip((t["function"]["name"] for t in TOOLS), (_weather, _light, _timer, _shopping, _message), strict=True))


def tool_call(rng: Random, *, evaluation: bool) -> Conversation:
    """A request that needs a tool; in training, also its result and the answer made of it."""
    tools = tuple(rng.sample(TOOLS, rng.randrange(1, 4)))
    name = rng.choice(tools)["function"]["name"]
    while True:
        asked, arguments, result, answer = _USES[name](rng)
        if held_out(json.dumps([name, arguments])) == evaluation:
            break
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    reasoning = f"I need {name}."
    messages: list[Message] = [
        user(asked),
        {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": [call]},
    ]
    thinking = rng.random() < 0.4
    if evaluation:
        return Conversation("tool call", tuple(messages), "", thinking, tools, (name, arguments))
    if rng.random() < 0.8:
        messages += [
            {"role": "tool", "tool_call_id": "call_0", "content": json.dumps(result)},
            said(answer, "The tool has answered."),
        ]
    return Conversation("tool call", tuple(messages), "", thinking, tools)


def tool_answer(rng: Random, *, evaluation: bool) -> Conversation:
    """The answer made of a tool's result, which also follows small talk with tools at hand."""
    if not evaluation and rng.random() < 0.3:
        talk = rng.choice((small_talk, arithmetic))(rng, evaluation=False)
        return Conversation("tool answer", talk.messages, "", talk.thinking, tuple(rng.sample(TOOLS, 2)))
    return tool_call(rng, evaluation=False)
