"""Answers the GPU's tickets: what a step misses is asked of expertd, while the step itself waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shared.memory.control_block import Addresses, ControlBlock


class TicketedExperts(Protocol):
    """What decoding needs of the experts' provider beyond what a forward of the model uses."""

    pool: torch.Tensor
    control: ControlBlock
    control_addresses: Addresses | None

    @property
    def wave_experts(self) -> int:
        """The most experts of one look-up."""

    def ask(self, layer: int, expert_ids: tuple[int, ...], held_slots: tuple[int, ...], clock: int) -> None:
        """Send for experts that the GPU found missing; the answer is in the slot table."""

    def pass_hint(self, layer: int, expert_ids: tuple[int, ...], is_guess: bool) -> None:
        """The GPU found these missing, and will want them, or may want them if it is a guess. Raises PeerLost."""

    def judge_guesses(self, look_ups: int, guessed: int, right: int) -> bool:
        """Whether to go on guessing: so many look-ups later, so many more guesses of missing experts were put to the
        test, and so many came true."""

    def take_answers(self) -> None:
        """Raises ServiceError or PeerLost if what was asked for cannot be had."""


@dataclass(slots=True)
class Tickets:
    """Reads the ring of the control block, in order; one reader per opened pool."""

    experts: TicketedExperts
    answered: int = 0
    missed: int = 0

    def serve(self) -> None:
        """Ask for what new tickets name, and see what became of earlier ones. Raises ServiceError, PeerLost."""
        control = self.experts.control
        for number in range(self.answered, control.ticket_head):
            layer, low, high, missing, held, *rest = control.tickets[number % len(control.tickets)].tolist()
            clock = (low & 0xFFFFFFFF) | high << 32
            self.answered = number + 1
            self.missed += missing
            self.experts.ask(layer, tuple(rest[:missing]), tuple(rest[missing : missing + held]), clock)
        self.experts.take_answers()
