"""From logits to one token id: greedy, or a seeded draw after temperature, top-k, top-p and min-p.

The draw is argmax(p / Exp(1) noise), which is a draw from the multinomial p, and uses one generator per request: the
same seed and the same logits give the same ids.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch

from shared.errors import ErrorCode, ServiceError

# Logits over less overflow, and long before that the likeliest token has all the probability.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0, or next to it, is greedy; top_k 0, top_p 1 and min_p 0 are off; a negative seed draws one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = -1

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check(self) -> None:
        """Raises ServiceError (bad_request) naming the first value out of range."""
        _demand(0.0 <= self.temperature <= 100.0, "temperature", "0 to 100", self.temperature)
        _demand(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _demand(0 <= self.top_k < 2**31, "top_k", "0 (off) to 2**31 - 1", self.top_k)
        _demand(0.0 <= self.min_p <= 1.0, "min_p", "0 to 1", self.min_p)
        _demand(self.seed < 2**63, "seed", "below 2**63", self.seed)


GREEDY = SamplingParams(temperature=0.0)


def _demand(ok: bool, name: str, what: str, value: float) -> None:
    if not ok:
        raise ServiceError(ErrorCode.BAD_REQUEST, f"{name} must be {what}, not {value}")


class Sampler:
    """The sampling state of one request."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._params = params
        self._generator = torch.Generator(device)
        self._generator.manual_seed(params.seed if params.seed >= 0 else secrets.randbits(63))

    def sample(self, logits: torch.Tensor) -> int:
        """The next id. logits: float32 [vocab]."""
        if self._params.is_greedy:
            return int(logits.argmax())
        probabilities = filtered_probabilities(logits, self._params)
        noise = torch.empty_like(probabilities).exponential_(generator=self._generator)
        return int((probabilities / noise).argmax())


def filtered_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """softmax(logits / temperature) with what top-k, then top-p, then min-p exclude set to 0; not renormalised.

    logits: float32 [vocab]. top-p keeps the fewest most likely tokens whose sum reaches p, at least one; ties at the
    k-th logit are all kept; min-p is relative to the most likely token.
    """
    scaled = logits / params.temperature
    if 0 < params.top_k < scaled.numel():
        threshold = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    probabilities = scaled.softmax(-1)
    if params.top_p < 1.0:
        ordered, ids = probabilities.sort(descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= params.top_p
        outside[0] = False  # the least numbers above 0 are 0 in float32
        probabilities = probabilities.index_fill(0, ids[outside], 0.0)
    if params.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
    return probabilities
