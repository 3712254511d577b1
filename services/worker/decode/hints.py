"""The host's half of hints: takes what the GPU names out of a ring in pinned memory, and passes it on to expertd.

A hint that comes too late is dropped, one that was overwritten is forgotten: hints are never needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.decode.hints import HINT_WORDS, HINTS
from services.worker.decode.tickets import TicketedExperts
from services.worker.device_memory import host_view


class Hint(NamedTuple):
    """Of use until the clock is above `clock`, that of the look-up which will want these experts."""

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
    """The ring of one decoder. `ring` and `written` are for kernels: int32 [HINTS, HINT_WORDS] and [1]."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._pinned = torch.zeros(HINTS, HINT_WORDS, dtype=torch.int32, pin_memory=is_cuda)
        self._entries = self._pinned.numpy()
        self._taken = 0
        self.ring = host_view(self._pinned, str(device)) if is_cuda else self._pinned
        self.written = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self) -> None:
        """Forget all hints; the GPU is at rest."""
        self._entries[:] = 0
        self.written.zero_()
        self._taken = 0

    def serve(self, experts: TicketedExperts) -> None:
        """Pass on what is new. Raises PeerLost."""
        for hint in self._new():
            if hint.clock >= experts.control.worker_clock:
                experts.pass_hint(hint.layer, hint.expert_ids, hint.is_guess)

    def _new(self) -> Iterator[Hint]:
        """One that is overwritten while it is read mixes two, whose layers and ids are valid all the same."""
        while (entry := self._entries[self._taken % HINTS])[0] > self._taken:
            hint = Hint.of(entry.tolist())
            self._taken = hint.number
            yield hint
