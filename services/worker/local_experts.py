"""Experts read by this very process, with a small cache of its own: for `icebox logits`, tests and benchmarks.

Serves one sequence without services. Reads are plain and buffered; nothing is shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from services.worker.model.weights import CPU
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import ExpertRecords


class LocalExperts:
    """Keeps the `cache_bytes` most recently used records on `device`; there is always room for one look-up."""

    def __init__(self, index: TensorIndex, config: ModelConfig, cache_bytes: int, device: torch.device = CPU) -> None:
        self._records = ExpertRecords(index, config)
        self._device = device
        self._capacity = cache_bytes // self._records.layout.slot_bytes
        self._cache: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()
        self.wave_experts = max(1, self._capacity, config.num_experts_per_tok)

    def look_up(self, layer: int, expert_ids: Sequence[int], ahead: Sequence[int] = ()) -> LocalLookUp:
        hits = {e: self._cache[layer, e] for e in expert_ids if (layer, e) in self._cache}
        for expert in hits:
            self._cache.move_to_end((layer, expert))
        return LocalLookUp(self, layer, hits, [e for e in expert_ids if e not in hits])

    def hint(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Reads are not worth starting early here: they would wait for the same thread."""

    def guess(self, layer: int, choose: Callable[[], Sequence[int]]) -> None:
        """As little."""

    @contextmanager
    def step(self) -> Iterator[None]:
        yield

    def read(self, layer: int, expert: int) -> torch.Tensor:
        record = torch.empty(self._records.layout.record_bytes, dtype=torch.uint8)
        self._records.read_record(layer, expert, record.numpy().data)
        record = record.to(self._device)
        self._cache[layer, expert] = record
        while len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
        return record


class LocalLookUp:
    """Records are held by reference, so eviction cannot change them."""

    __slots__ = ("_experts", "_layer", "_missing", "hits")

    def __init__(self, experts: LocalExperts, layer: int, hits: dict[int, torch.Tensor], missing: list[int]) -> None:
        self._experts = experts
        self._layer = layer
        self._missing = missing
        self.hits: Mapping[int, torch.Tensor] = hits

    def wait(self) -> Mapping[int, torch.Tensor]:
        return {expert: self._experts.read(self._layer, expert) for expert in self._missing}

    def done(self) -> None:
        """Nothing is held."""
