"""Which tokens go to which expert, and with which weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Assignment:
    """A router's decision, seen from the experts. One token alone needs no gathering and no scattering."""

    def __init__(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """topk_ids int64, topk_weights float32: [m, k], an expert at most once in a row."""
        self.is_single = len(topk_ids) == 1
        self._tokens: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor]
        if self.is_single:
            self._weights = dict(zip(topk_ids[0].tolist(), torch.split(topk_weights[0], 1), strict=True))
        else:
            ids, order = topk_ids.flatten().sort(stable=True)
            experts, counts = (t.tolist() for t in torch.unique_consecutive(ids, return_counts=True))
            self._tokens = dict(zip(experts, torch.split(order // topk_ids.shape[1], counts), strict=True))
            self._weights = dict(zip(experts, torch.split(topk_weights.flatten()[order], counts), strict=True))
        self.experts: Sequence[int] = sorted(self._weights)
        """The distinct experts, ascending."""

    def rows(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """The expert's tokens of x [m, d], in ascending order."""
        return x if self.is_single else x.index_select(0, self._tokens[expert])

    def weights(self, expert: int) -> torch.Tensor:
        """Their weights, float32 [t]."""
        return self._weights[expert]

    def add(self, total: torch.Tensor, expert: int, y: torch.Tensor) -> None:
        """Add the expert's outputs y [t, d] to its tokens' rows of total, float32 [m, d]."""
        if self.is_single:
            total.add_(y)
        else:
            total.index_add_(0, self._tokens[expert], y.float())
