"""The corpus: what follows from a seed, what is kept apart from training, which tokens count."""

from __future__ import annotations

from itertools import islice
from random import Random

import numpy as np
import pytest

from demo import recall, tasks
from demo.corpus import HERE, SHORT, Renderer, long_conversation, rows, short_conversation
from demo.questions import Verdict, judge, questions
from demo.tasks import Conversation
from services.front.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(Tokenizer.load(HERE))


def test_rows_follow_from_the_seed(renderer: Renderer) -> None:
    first, again, other = (list(islice(rows(renderer, seed, SHORT), 3)) for seed in (5, 5, 6))
    assert all(
        np.array_equal(a.ids, b.ids) and np.array_equal(a.weights, b.weights) for a, b in zip(first, again, strict=True)
    )
    assert not np.array_equal(first[0].ids, other[0].ids)
    assert all(row.ids.shape == row.weights.shape == (SHORT,) for row in first)


def test_no_evaluation_question_occurs_in_training() -> None:
    asked = [q for q in questions(lambda text: len(text.split()), share=0.3) if "seen" not in q.category]
    wanted = {q.conversation.messages[-2]["content"]: q.category for q in asked}
    rng = Random("training")
    trained = [short_conversation(rng) for _ in range(6000)] + [long_conversation(rng) for _ in range(20)]
    said = {message["content"] for talk in trained for message in talk.messages}
    # "What is my name?" is asked in training too; what is apart there is what was said before.
    assert {wanted[text] for text in wanted.keys() & said} <= {"name after some turns"}


def test_held_out_contents_never_appear_in_training() -> None:
    rng = Random("contents")
    trained = [tasks.arithmetic(rng, evaluation=False) for _ in range(3000)]
    asked = [tasks.arithmetic(rng, evaluation=True) for _ in range(300)]

    def sums(talks: list[Conversation]) -> set[str]:
        equations = [talk.messages[-1]["content"].rstrip(".").split(". ")[-1] for talk in talks]
        return {equation.split(" = ")[0] for equation in equations}

    assert not sums(trained) & sums(asked)
    planted = {fact.sentence for _ in range(200) for fact in recall.draw_facts(rng, 20)}
    held = {recall.draw_fact(rng, evaluation=True).sentence for _ in range(500)}
    assert not planted & held


def test_only_what_the_model_says_counts_fully(renderer: Renderer) -> None:
    talk = Conversation("x", (tasks.user("Hi"), tasks.said("Hello."), tasks.user("And?"), tasks.said("Yes.")), "")
    ids = renderer.prompt(talk, answer=True)
    own = [i for i, w in zip(ids, renderer.weigh(ids), strict=True) if w == 16]
    text = b"".join(map(renderer.tokenizer.token_bytes, own)).decode()
    assert text == "Hello.<｜end▁of▁sentence｜>Yes.<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("seed", range(20))
def test_the_right_answer_is_judged_right_and_another_is_not(renderer: Renderer, seed: int) -> None:
    rng = Random(seed)
    for task in (tasks.arithmetic, tasks.tool_call, tasks.story_questions, tasks.remembered_name):
        talk = task(rng, evaluation=True)
        whole, start = renderer.prompt(talk, answer=True), len(renderer.prompt(talk, answer=False))
        answer = b"".join(map(renderer.tokenizer.token_bytes, whole[start:])).decode()
        assert judge(talk, answer) == Verdict(right=True, well_formed=True)
        other = "<｜end▁of▁sentence｜>" if not talk.thinking else "So.</think>No.<｜end▁of▁sentence｜>"
        assert not judge(talk, other).right
        assert not judge(talk, answer.removesuffix("<｜end▁of▁sentence｜>") + "<think>").well_formed


def test_questions_come_at_the_distance_asked_for(renderer: Renderer) -> None:
    def count(text: str) -> int:
        return len(renderer.tokenizer.encode([(text, False)]))

    talk = recall.question_after(Random(1), 700, count)
    text, sentence = talk.messages[0]["content"], talk.messages[1]["content"]
    assert 650 <= count(text[text.index(sentence) + len(sentence) :]) <= 920
