"""Answers of the services on a GPU: cache and prefetch change no bit, and the demo answers as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.invariance import ALL, LEAST, Answers, answers, check_whole

from demo.corpus import HERE, Renderer
from demo.evaluate import Engine
from demo.questions import judge, questions
from services.front.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)  # compilers, where nothing is compiled yet
ON_GPU = {"device": "cuda", "threads": 1, "prefill_chunk": 64}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    everything = answers(tmp_path_factory.mktemp("all"), cache={"bytes": ALL}, worker=ON_GPU)
    check_whole(everything)
    return everything


@pytest.mark.parametrize("hash_layers", [True, False])
@pytest.mark.parametrize("cache_bytes", [ALL // 2, LEAST])
def test_the_same_bits(tmp_path: Path, expected: Answers, cache_bytes: int, hash_layers: bool) -> None:
    prefetch = {"hash_layers": hash_layers, "look_ahead": hash_layers}
    assert answers(tmp_path, cache={"bytes": cache_bytes}, prefetch=prefetch, worker=ON_GPU) == expected


def test_the_demo_answers_as_on_a_cpu() -> None:
    """Formats are the same, sums go another way: nearly all answers agree to the letter, and as many are right."""
    tokenizer = Tokenizer.load(HERE / "checkpoint")
    renderer = Renderer(tokenizer)
    asked = [q.conversation for q in questions(lambda text: len(tokenizer.encode([(text, False)])), share=0.1)]
    same, right = 0, {"cpu": 0, "cuda": 0}
    engines = {name: Engine(HERE / "checkpoint", torch.device(name)) for name in right}
    for talk in asked:
        prompt = renderer.prompt(talk, answer=False)
        ids = {name: engine(prompt) for name, engine in engines.items()}
        same += ids["cpu"] == ids["cuda"]
        for name, answer in ids.items():
            text = b"".join(map(tokenizer.token_bytes, answer)).decode(errors="replace")
            right[name] += judge(talk, text).right
    assert same >= 0.8 * len(asked), f"{same} of {len(asked)} answers agree"
    assert right["cuda"] >= right["cpu"] - 1, right
