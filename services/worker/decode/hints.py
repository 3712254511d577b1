"""The host's half of hints: takes what the GPU names out of a ring in pinned memory, and passes it on to expertd.

A hint that comes too late is dropped, one that was overwritten is forgotten: hints are never needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.decode.hints import HINT_WORDS, HINTED_WORDS, HINTS
from services.worker.decode.tickets import TicketedExperts
from services.worker.device_memory import host_view


class Hint(NamedTuple):
    """Useful until the worker's clock passes `clock`, that of the look-up which will want these experts."""

    number: int
    is_guess: bool
    layer: int
    clock: int
    expert_ids: tuple[int, ...]

    @classmethod
    def of(cls, words: list[int]) -> Hint:
        number, is_guess, layer, low, high, count, *ids = words
        return cls(number, bool(is_guess), layer, (low & 0xFFFFFFFF) | high << 32, tuple(ids[:count]))


class Hints:
    """The ring of one decoder, and the score of its guesses.

    For kernels, int32: `ring` [HINTS, HINT_WORDS], `judged` [2] and `is_wanted` [1] in the host's memory; on the device
    `hinted` [HINTED_WORDS] and, for layers of even and odd numbers, `guessed` [2, experts].
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._device = device
        self._pinned: list[torch.Tensor] = []
        self._entries, self.ring = self._host(HINTS, HINT_WORDS)
        self._score, self.judged = self._host(2)
        self._wanted, self.is_wanted = self._host(1)
        self.hinted = torch.zeros(HINTED_WORDS, dtype=torch.int32, device=device)
        self.guessed = torch.full((2, num_experts), -1, dtype=torch.int32, device=device)
        self._taken = 0
        self._judged = [0, 0]
        self._clock = 0

    def begin(self, experts: TicketedExperts) -> None:
        """Forget all hints and the score; the GPU is at rest."""
        self._entries[:] = self._score[:] = 0
        self.hinted.zero_()
        self._taken, self._judged, self._clock = 0, [0, 0], experts.control.worker_clock
        self.judge(experts)

    def serve(self, experts: TicketedExperts) -> None:
        """Pass on what is new, and judge as often as layers end: guesses that cost too much end soon.

        Raises ServiceError, PeerLost.
        """
        for hint in self._new():
            if hint.clock >= experts.control.worker_clock:
                experts.pass_hint(hint.layer, hint.expert_ids, hint.is_guess)
        if experts.control.worker_clock > self._clock:
            self.judge(experts)

    def judge(self, experts: TicketedExperts) -> None:
        """Have the GPU guess, or not, by how it went since the last time."""
        clock, score = experts.control.worker_clock, self._score.tolist()
        news = (after - before for before, after in zip(self._judged, score, strict=True))
        self._wanted[0] = experts.judge_guesses(clock - self._clock, *news)
        self._judged, self._clock = score, clock

    def _new(self) -> Iterator[Hint]:
        """One that is overwritten while it is read mixes two, whose layers and ids are valid all the same."""
        while (entry := self._entries[self._taken % HINTS])[0] > self._taken:
            hint = Hint.of(entry.tolist())
            self._taken = hint.number
            yield hint

    def _host(self, *shape: int) -> tuple[npt.NDArray[np.int32], torch.Tensor]:
        """Memory of the host: for us, and as a kernel sees it."""
        is_cuda = self._device.type == "cuda"
        memory = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self._pinned.append(memory)
        return memory.numpy(), host_view(memory, str(self._device)) if is_cuda else memory
