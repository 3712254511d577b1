"""Experts in a pool of this process on the GPU, with a real control block: what decoding needs, without expertd.

Some may be missing at first; they arrive some milliseconds after they were asked for, through another stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import ExpertRecords
from shared.cuda.device import Device
from shared.cuda.host_memory import Registration
from shared.errors import ErrorCode, ServiceError
from shared.memory.control_block import ControlBlock


class ResidentExperts:
    """Provider for prefill and for decoding. `forget` makes experts missing; `fails` makes a request for one fail."""

    def __init__(self, index: TensorIndex, config: ModelConfig, delay_s: float = 0.002) -> None:
        records = ExpertRecords(index, config)
        layers, experts = config.num_moe_layers, config.n_routed_experts
        self.wave_experts = experts
        self._experts, self._delay_s = experts, delay_s
        host = torch.zeros(layers * experts, records.layout.slot_bytes, dtype=torch.uint8)
        for key in range(layers * experts):
            records.read_record(*divmod(key, experts), host[key].numpy().data)
        self._host = host.pin_memory()
        self.pool = self._host.to("cuda")
        self._record_bytes = records.layout.record_bytes
        self.control = ControlBlock.create(layers, experts)
        self._registration = Registration(Device.named("cuda"), self.control.address, self.control.nbytes)
        self.control_addresses = self.control.addresses(self._registration.device_address)
        self.fails = False
        self.asked: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = []
        self.hinted: list[tuple[int, tuple[int, ...], bool]] = []
        self.wants_guesses = True
        self.look_ups = self.guessed = self.guessed_right = 0
        self._stream = torch.cuda.Stream()
        self._arriving: list[threading.Thread] = []
        self.remember_all()

    def remember_all(self) -> None:
        """Everything is resident again; expert e of layer l in slot l * experts + e."""
        self.pool.copy_(self._host)
        table = self.control.slot_table
        table[:] = np.arange(table.size).reshape(table.shape)

    def forget(self, keys: Sequence[tuple[int, int]]) -> None:
        for layer, expert in keys:
            self.control.slot_table[layer, expert] = -1
            self.pool[layer * self._experts + expert].fill_(0x55)

    def until_quiet(self) -> None:
        """Wait until everything that was asked for or hinted at is here."""
        while self._arriving:
            self._arriving.pop().join()

    def ask(self, layer: int, expert_ids: tuple[int, ...], held_slots: tuple[int, ...], clock: int) -> None:
        self.asked.append((layer, expert_ids, held_slots, clock))
        self._fetch(layer, expert_ids)

    def pass_hint(self, layer: int, expert_ids: tuple[int, ...], is_guess: bool) -> None:
        self.hinted.append((layer, expert_ids, is_guess))
        self._fetch(layer, expert_ids)

    def judge_guesses(self, look_ups: int, guessed: int, right: int) -> bool:
        self.look_ups += look_ups
        self.guessed += guessed
        self.guessed_right += right
        return self.wants_guesses

    def take_answers(self) -> None:
        if self.fails and self.asked:
            raise ServiceError(ErrorCode.IO_ERROR, "shard: cannot read")

    def look_up(self, layer: int, expert_ids: Sequence[int], ahead: Sequence[int] = ()) -> _LookUp:
        first = layer * self._experts
        return _LookUp({e: self.pool[first + e, : self._record_bytes] for e in expert_ids})

    def hint(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Everything that prefill needs is here."""

    def guess(self, layer: int, choose: Callable[[], Sequence[int]]) -> None:
        """As above."""

    @contextmanager
    def step(self) -> Iterator[None]:
        self.control.busy = True
        yield
        self.control.busy = False

    def close(self) -> None:
        self._registration.close()
        self.control.close()

    def _fetch(self, layer: int, expert_ids: tuple[int, ...]) -> None:
        if not self.fails:
            self._arriving.append(threading.Thread(target=self._bring, args=(layer, expert_ids)))
            self._arriving[-1].start()

    def _bring(self, layer: int, expert_ids: tuple[int, ...]) -> None:
        time.sleep(self._delay_s)
        with torch.cuda.stream(self._stream):
            for expert in expert_ids:
                slot = layer * self._experts + expert
                self.pool[slot].copy_(self._host[slot], non_blocking=True)
        self._stream.synchronize()
        for expert in expert_ids:
            self.control.slot_table[layer, expert] = layer * self._experts + expert


class _LookUp:
    def __init__(self, hits: Mapping[int, torch.Tensor]) -> None:
        self.hits = hits

    def wait(self) -> Mapping[int, torch.Tensor]:
        return {}

    def done(self) -> None:
        """Nothing moves."""
