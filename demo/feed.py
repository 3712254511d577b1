"""Training rows made ahead of the GPU by other processes, and held-out conversations as rows for quick checks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.queues import Queue
from random import Random

import numpy as np
import torch
from torch import Tensor

from demo import corpus, recall, tasks
from demo.corpus import HERE, LONG, SHORT, Renderer, rows
from demo.tasks import Conversation
from services.front.tokenizer import Tokenizer

Batch = tuple[Tensor, Tensor]


def renderer() -> Renderer:
    return Renderer(Tokenizer.load(HERE))


def _produce(queue: Queue, seed: int, length: int, batch: int) -> None:
    source = rows(renderer(), seed, length)
    while True:
        picked = [next(source) for _ in range(batch)]
        queue.put((np.stack([r.ids for r in picked]), np.stack([r.weights for r in picked])))


class Feed:
    """Batches (ids int64, weights float32, both [batch, length]) of either length, on the device."""

    def __init__(self, seed: int, sizes: dict[int, int], processes: int, device: str) -> None:
        context = multiprocessing.get_context("fork")
        self._device = device
        self._queues = {length: context.Queue(24) for length in sizes}
        for number in range(processes):
            length = (SHORT, LONG)[number % 2]
            args = (self._queues[length], seed * 1000 + number, length, sizes[length])
            context.Process(target=_produce, args=args, daemon=True).start()

    def next(self, length: int) -> Batch:
        ids, weights = self._queues[length].get()
        return (
            torch.from_numpy(ids.astype(np.int64)).to(self._device, non_blocking=True),
            torch.from_numpy(weights).to(self._device, non_blocking=True).float() / 16,
        )


CHECKS: dict[str, Callable[[Random], Conversation]] = {
    "arithmetic": lambda rng: tasks.arithmetic(rng, evaluation=True, thinking=False),
    "thinking": lambda rng: tasks.arithmetic(rng, evaluation=True, thinking=True),
    "letters": lambda rng: tasks.letters(rng, evaluation=True),
    "story": lambda rng: tasks.story_questions(rng, evaluation=True),
    "name": lambda rng: tasks.remembered_name(rng, evaluation=True),
    "tools": lambda rng: tasks.tool_call(rng, evaluation=True),
    "near": lambda rng: _recall(rng, 100, 350),
    "middle": lambda rng: _recall(rng, 500, 1500),
    "far": lambda rng: _recall(rng, 1500, 2800),
}
LONG_CHECKS = ("middle", "far")
_COUNTER: list[Renderer] = []


def _recall(rng: Random, low: int, high: int) -> Conversation:
    if not _COUNTER:
        _COUNTER.append(renderer())
    return recall.question_after(
        rng, rng.randrange(low, high), lambda text: len(_COUNTER[0].tokenizer.encode([(text, False)]))
    )


class Check:
    """Held-out conversations, one a row, and how many the model would answer to the letter."""

    def __init__(self, length: int, rows_per_kind: int, seed: int, device: str) -> None:
        made, self._kinds = renderer(), []
        ids = torch.ones((0, length), dtype=torch.long)
        marks = torch.zeros((0, length), dtype=torch.bool)
        rng = Random(f"check {seed}")
        for kind, draw in CHECKS.items():
            while (kind in LONG_CHECKS) == (length > SHORT) and self._kinds.count(kind) < rows_per_kind:
                conversation = draw(rng)
                whole = made.prompt(conversation, answer=True)
                start = len(made.prompt(conversation, answer=False))
                if len(whole) > length:
                    continue
                row = torch.ones(1, length, dtype=torch.long)
                row[0, : len(whole)] = torch.tensor(whole)
                mark = torch.zeros(1, length, dtype=torch.bool)
                mark[0, start : len(whole)] = True
                ids, marks = torch.cat((ids, row)), torch.cat((marks, mark))
                self._kinds.append(kind)
        self.ids, self._marks = ids.to(device), marks.to(device)

    def score(self, predict: Callable[[Tensor], Tensor], batch: int) -> dict[str, float]:
        """Share of rows whose answer is predicted right at every token; `predict`: ids [b, s] -> likeliest next ids."""
        right = []
        for part in range(0, len(self.ids), batch):
            ids, marks = self.ids[part : part + batch], self._marks[part : part + batch]
            short = batch - len(ids)
            guess = predict(torch.cat((ids, ids[:1].expand(short, -1))))[: len(ids)]
            wrong = (guess[:, :-1] != ids[:, 1:]) & marks[:, 1:]
            right += (~wrong.any(1)).tolist()
        sums = {kind: [r for r, k in zip(right, self._kinds, strict=True) if k == kind] for kind in set(self._kinds)}
        return {kind: sum(hits) / len(hits) for kind, hits in sorted(sums.items())}


assert corpus.LONG % 128 == 0
