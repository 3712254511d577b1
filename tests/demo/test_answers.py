"""The trained model in Icebox's own engine: it answers, and it stops remembering when its memory is taken away.

These fail for small faults in attention, experts or formats that tests on random weights cannot tell from noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from demo import recall, tasks
from demo.corpus import HERE, Renderer
from demo.evaluate import Engine
from demo.questions import judge
from demo.tasks import Conversation
from services.front.tokenizer import Tokenizer
from services.worker.model.attention import Attention


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(HERE / "checkpoint")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(Tokenizer.load(HERE / "checkpoint"))


def _right(engine: Engine, renderer: Renderer, talks: list[Conversation]) -> float:
    verdicts = []
    for talk in talks:
        ids = engine(renderer.prompt(talk, answer=False))
        verdicts.append(judge(talk, b"".join(map(renderer.tokenizer.token_bytes, ids)).decode(errors="replace")))
    return sum(v.right for v in verdicts) / len(verdicts)


@pytest.mark.parametrize("task", [tasks.story_questions, tasks.tool_call, tasks.remembered_name, tasks.small_talk])
def test_it_answers(engine: Engine, renderer: Renderer, task: object) -> None:
    assert callable(task)
    rng = Random("answers")
    assert _right(engine, renderer, [task(rng, evaluation=True) for _ in range(2)]) == 1.0


def test_it_calculates(engine: Engine, renderer: Renderer) -> None:
    rng = Random("answers")
    talks = [tasks.arithmetic(rng, evaluation=True, thinking=thinking) for thinking in (False, True) for _ in range(3)]
    assert _right(engine, renderer, talks) >= 0.8


def _recall(renderer: Renderer, tokens: int, count: int) -> list[Conversation]:
    rng = Random("answers")
    return [
        recall.question_after(rng, tokens, lambda text: len(renderer.tokenizer.encode([(text, False)])))
        for _ in range(count)
    ]


def test_it_remembers_what_left_the_window_long_ago(engine: Engine, renderer: Renderer) -> None:
    assert _right(engine, renderer, _recall(renderer, 700, 2) + _recall(renderer, 2300, 1)) == 1.0


def test_without_compressed_entries_it_forgets(
    engine: Engine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = Attention.attend

    def near_sighted(self, q, kv, chosen, state, position):  # type: ignore[no-untyped-def]
        nothing = None if chosen is None else torch.zeros_like(chosen)
        return attend(self, q, kv, nothing, state, position)

    monkeypatch.setattr(Attention, "attend", near_sighted)
    assert _right(engine, renderer, _recall(renderer, 300, 6)) < 0.5
