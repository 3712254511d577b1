"""Masters in float32 beside the weights that the model computes with, and the optimisers that move them.

The model's own parameters are what the checkpoint will hold: rounded to bfloat16, or, once `quantised` is set, to the
stored FP4 and FP8. Gradients at those rounded weights are applied to the masters (a straight-through estimator
without a single hook). Matrices move by Muon (https://kellerjordan.github.io/posts/muon), the rest by Adam.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from demo import quantise

Rounding = Callable[[Tensor], Tensor]


def rounding_of(name: str) -> Rounding | None:
    """How the checkpoint stores a parameter of the model or of its extra block, if not as plain bfloat16 / float32."""
    if ".experts." in name:
        return quantise.fp4_rounded
    fp8 = ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_proj", "self_attn.o_a_proj", "self_attn.o_b_proj")
    if any(part in name for part in (*fp8, ".shared_experts.", "indexer.q_b_proj", "mtp.e_proj", "mtp.h_proj")):
        return quantise.fp8_rounded
    return None


def _by_muon(name: str, parameter: Tensor) -> bool:
    vocabulary = "embed_tokens" in name or "lm_head" in name
    mixing = "_hc." in name or "hc_head" in name or ".gate.weight" in name or "position_bias" in name
    return parameter.ndim >= 2 and not vocabulary and not mixing


@dataclass(slots=True)
class _Slot:
    name: str
    parameter: nn.Parameter
    master: Tensor
    first: Tensor
    second: Tensor | None
    rounding: Rounding | None


class Optimiser:
    """Owns the masters of some parameters. Learning rates are given with every step."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.quantised = False
        self._steps = 0
        self._muon: dict[torch.Size, list[_Slot]] = defaultdict(list)
        self._adam: list[_Slot] = []
        for name, parameter in parameters:
            master = parameter.detach().float().clone()
            rounding = rounding_of(name)
            if _by_muon(name, parameter):
                slot = _Slot(name, parameter, master, torch.zeros_like(master), None, rounding)
                self._muon[parameter.shape].append(slot)
            else:
                zeros = torch.zeros_like(master)
                self._adam.append(_Slot(name, parameter, master, zeros, zeros.clone(), rounding))

    def masters(self) -> dict[str, Tensor]:
        return {slot.name: slot.master for slot in self._slots()}

    @torch.no_grad()
    def step(self, muon_rate: float, adam_rate: float) -> None:
        self._steps += 1
        for group in self._muon.values():
            self._muon_step(group, muon_rate)
        self._adam_step(adam_rate)
        self.publish()
        for slot in self._slots():
            slot.parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for slot in self._slots():
            rounded = slot.rounding(slot.master) if self.quantised and slot.rounding else slot.master
            slot.parameter.copy_(rounded)

    def _slots(self) -> Iterable[_Slot]:
        for group in self._muon.values():
            yield from group
        yield from self._adam

    def _muon_step(self, group: list[_Slot], rate: float) -> None:
        group = [slot for slot in group if slot.parameter.grad is not None]
        if not group:
            return
        gradients = [slot.parameter.grad.float() for slot in group]
        firsts = [slot.first for slot in group]
        torch._foreach_lerp_(firsts, gradients, 0.05)
        moves = torch.stack([g.lerp(f, 0.95) for g, f in zip(gradients, firsts, strict=True)])
        rows, columns = moves.shape[-2:]
        moves = _orthogonal(moves.flatten(0, -3)).view_as(moves) * max(1.0, rows / columns) ** 0.5
        for slot, move in zip(group, moves, strict=True):
            slot.master.mul_(1 - rate * 0.02).add_(move, alpha=-rate)

    def _adam_step(self, rate: float) -> None:
        slots = [slot for slot in self._adam if slot.parameter.grad is not None]
        gradients = [slot.parameter.grad.float() for slot in slots]
        firsts, seconds = [s.first for s in slots], [s.second for s in slots]
        torch._foreach_lerp_(firsts, gradients, 0.1)
        torch._foreach_mul_(seconds, 0.98)
        torch._foreach_addcmul_(seconds, gradients, gradients, 0.02)
        correction1, correction2 = 1 - 0.9**self._steps, 1 - 0.98**self._steps
        roots = torch._foreach_sqrt(torch._foreach_div(seconds, correction2))
        torch._foreach_add_(roots, 1e-8)
        moves = torch._foreach_div(torch._foreach_div(firsts, correction1), roots)
        torch._foreach_add_([s.master for s in slots], moves, alpha=-rate)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices [n, r, c] by five Newton-Schulz steps in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()
