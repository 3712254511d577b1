"""Pools the keys of a group of tokens into one entry, each channel with its own softmax over the group."""

from __future__ import annotations

import torch


def compress(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Entries of groups that do not overlap. kv, gate: [n, tokens, d] float32; returns [n, d] float32."""
    return (gate.softmax(1) * kv).sum(1)


def compress_overlapping(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Entries that also see the group before them: its first half of the width, the own group's second half.

    kv, gate: [n + 1, tokens, 2 * d] float32, the group before the first one included (gate -inf if there is none).
    Returns [n, d] float32.
    """
    d = kv.shape[-1] // 2
    return compress(_halves(kv, d), _halves(gate, d))


def _halves(x: torch.Tensor, d: int) -> torch.Tensor:
    return torch.cat((x[:-1, :, :d], x[1:, :, d:]), 1)
