"""Records which experts 50 conversations use, for cache studies: `tests/data/demo-routes.npz`.

    python -m demo.routes

The file holds, for every token in order: `experts` uint8 [tokens, layers, experts per token], `guesses` of the same
shape (what the next layer's router says of the layer before's input; 255 where the engine does not guess),
`conversation` uint8 and `decoded` bool [tokens] (false: prompt, which the engine takes in as a whole).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
NO_GUESS = 255


class RouteRecorder:
    """Listens to every router of a model, and to its guesses."""

    def __init__(self, engine: Engine) -> None:
        self._layers: list[list[torch.Tensor]] = [[] for _ in engine.model.layers]
        self._guesses: list[tuple[int, Sequence[int]]] = []
        engine.experts.guess = self._listen  # type: ignore[method-assign]
        for layer, heard in zip(engine.model.layers, self._layers, strict=True):
            layer.moe.route = _listened(layer.moe.route, heard)  # type: ignore[method-assign]

    def take(self, prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Choices and guesses [tokens, layers, k] since the last time: a prompt, then one token at a time."""
        rows = torch.stack([torch.cat(heard) for heard in self._layers], 1).to(torch.uint8).numpy()
        guesses = np.full_like(rows, NO_GUESS)
        token, last = prompt_tokens - 1, len(self._layers)
        for layer, chosen in self._guesses:
            token += layer <= last  # from the first layers again
            guesses[token, layer], last = chosen, layer
        for heard in (*self._layers, self._guesses):
            heard.clear()
        return rows, guesses

    def _listen(self, layer: int, choose: Callable[[], Sequence[int]]) -> None:
        self._guesses.append((layer, choose()))


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
    parts: dict[str, list[np.ndarray]] = {"experts": [], "guesses": [], "conversation": [], "decoded": []}
    for number, talk in enumerate(conversations()):
        prompt = renderer.prompt(talk, answer=False)
        engine(prompt)
        rows, guesses = recorder.take(len(prompt))
        parts["experts"].append(rows)
        parts["guesses"].append(guesses)
        parts["conversation"].append(np.full(len(rows), number, np.uint8))
        parts["decoded"].append(np.arange(len(rows)) >= len(prompt))
    TRACE.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(TRACE, **{name: np.concatenate(rows) for name, rows in parts.items()})
    print(f"{TRACE}: {sum(map(len, parts['decoded']))} tokens, {TRACE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
