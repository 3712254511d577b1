"""Records which experts 50 conversations use, for cache studies: `tests/data/demo-routes.npz`.

    python -m demo.routes

The file holds, for every token in order: `experts` uint8 [tokens, layers, experts per token], `conversation` uint8 and
`decoded` bool [tokens] (false: prompt, which the engine takes in as a whole).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch

from demo import tasks
from demo.corpus import HERE, Renderer
from demo.evaluate import Engine
from demo.tasks import Conversation
from services.front.tokenizer import Tokenizer

TRACE = HERE.parent / "tests" / "data" / "demo-routes.npz"
CONVERSATIONS = 50


class RouteRecorder:
    """Listens to every router of a model; `rows` [tokens, layers, k] of what was chosen since the last `take`."""

    def __init__(self, engine: Engine) -> None:
        self._layers: list[list[torch.Tensor]] = [[] for _ in engine.model.layers]
        for layer, heard in zip(engine.model.layers, self._layers, strict=True):
            layer.moe.route = _listened(layer.moe.route, heard)  # type: ignore[method-assign]

    def take(self) -> torch.Tensor:
        rows = torch.stack([torch.cat(heard) for heard in self._layers], 1).to(torch.uint8)
        for heard in self._layers:
            heard.clear()
        return rows


def _listened(route, heard):  # type: ignore[no-untyped-def]
    def listening(x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = route(x, token_ids)
        heard.append(chosen)
        return chosen, weights

    return listening


def conversations() -> Iterator[Conversation]:
    """Of one kind for a while, then of another, as people do."""
    rng = Random("routes")
    kinds = (tasks.storytelling, tasks.arithmetic, tasks.story_questions, tasks.letters, tasks.remembered_name)
    for number in range(CONVERSATIONS):
        yield kinds[number // 2 % len(kinds)](rng, evaluation=True)


def main() -> None:
    torch.set_num_threads(1)
    engine, renderer = Engine(HERE / "checkpoint"), Renderer(Tokenizer.load(HERE / "checkpoint"))
    recorder = RouteRecorder(engine)
    experts, numbers, decoded = [], [], []
    for number, talk in enumerate(conversations()):
        prompt = renderer.prompt(talk, answer=False)
        engine(prompt)
        rows = recorder.take().numpy()
        experts.append(rows)
        numbers.append(np.full(len(rows), number, np.uint8))
        decoded.append(np.arange(len(rows)) >= len(prompt))
    save(TRACE, np.concatenate(experts), np.concatenate(numbers), np.concatenate(decoded))


def save(path: Path, experts: np.ndarray, numbers: np.ndarray, decoded: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, experts=experts, conversation=numbers, decoded=decoded)
    print(f"{path}: {len(experts)} tokens, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
