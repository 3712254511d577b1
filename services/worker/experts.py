"""How the model gets at experts, and the implementation that shares expertd's slot pool.

The model asks for the experts of one layer by id and receives records: where the bytes lie, who read them and whether
they had to be waited for is decided here. A hit costs no message: the slot table in shared memory is the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.device_memory import pool_tensor
from services.worker.look_ahead import LookAhead, LookAheadCounters
from services.worker.working_time import WorkingTime
from shared.config import PrefetchConfig
from shared.errors import CapacityError, ErrorCode, PeerLost, ServiceError
from shared.memory.control_block import Addresses, ControlBlock
from shared.memory.host import HostSlab
from shared.memory.slab import Slab, open_slab
from shared.protocol.messages import (
    ClosePool,
    ErrorReply,
    ExpertsFetched,
    FetchExperts,
    OpenPool,
    PoolOpened,
    PrefetchHint,
)
from shared.transport.client import BlockingClient, service_error

# A record is 13 MB at most and a wave a few hundred of them; a disk that needs longer than this is broken.
FETCH_TIMEOUT_S = 60.0
# A peer that is gone is noticed well within this.
NOTICED_S = 1.0


class LookUp(Protocol):
    """One wave of experts of one layer. The records stay what they are until `done`."""

    @property
    def hits(self) -> Mapping[int, torch.Tensor]:
        """Expert id -> uint8 record [record_bytes], for those that were resident at look-up."""

    def wait(self) -> Mapping[int, torch.Tensor]:
        """The others, once they are read. Raises ServiceError or PeerLost if they cannot be."""

    def done(self) -> None:
        """The caller has finished with every record of this look-up."""


class ExpertProvider(Protocol):
    """Where experts come from. One look-up is open at a time."""

    @property
    def wave_experts(self) -> int:
        """The most experts of one look-up."""

    def look_up(self, layer: int, expert_ids: Sequence[int], ahead: Sequence[int] = ()) -> LookUp:
        """Find `expert_ids` (distinct, ascending) of a MoE layer and ask for what is missing; returns at once.

        `ahead` is the wave after this one: it is asked for too, so that it is read under this wave's compute.
        """

    def hint(self, layer: int, expert_ids: Sequence[int]) -> None:
        """These experts of the layer will certainly be looked up soon."""

    def guess(self, layer: int, choose: Callable[[], Sequence[int]]) -> None:
        """The layer that is looked up next may want what `choose` names; it is called only if a guess is of use."""

    def step(self) -> AbstractContextManager[None]:
        """Look-ups happen inside a step, one forward pass of the model; outside of it no slot is held."""


@dataclass(slots=True)
class ExpertCounters(LookAheadCounters):
    """Cumulative over the life of the worker.

    `lookups` counts experts, and `resident` those of them that were there; `fetch_messages` asked for the others, and
    `hint_messages` named experts in advance. `wait_seconds` were spent without an expert to compute with.
    """

    lookups: int = 0
    resident: int = 0
    fetch_messages: int = 0
    hint_messages: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Demand:
    """A request for what a look-up found missing, sent at a time of `perf_counter`.

    It is plain if it names one record that was not asked for before: then the time to its answer is that of a read.
    """

    request_id: int
    sent: float
    is_plain: bool


class SharedExperts:
    """Experts in the pool of a running expertd. Owned by one thread.

    Follows the worker's half of the slot protocol: it alone writes `worker_clock`, `busy` and `uses`; the clock goes
    up once per finished look-up, and `busy` is set around every step, so that an idle worker holds no slot back.

    `pool` is the slots, uint8 [num_slots, slot_bytes] on the device. On a GPU `control_addresses` is where kernels find
    the fields of `control`; None on a CPU.
    """

    def __init__(
        self,
        client: BlockingClient,
        opened: PoolOpened,
        device: str,
        record_bytes: int,
        prefetch: PrefetchConfig,
        counters: ExpertCounters,
    ) -> None:
        self._client = client
        self._wave_experts = opened.wave_experts
        self._prefetch = prefetch
        self._look_ahead = LookAhead(counters)
        self._counters = counters
        with ExitStack() as mapped:
            try:
                self.control = ControlBlock.open(opened.control_handle)
                mapped.callback(self.control.close)
                slab = open_slab(opened.slab_handle, device)
                mapped.callback(slab.close)
            except CapacityError:
                client.poll(NOTICED_S)  # raises if it is because expertd is gone
                raise
            # A worker before us may have died inside a step.
            self.control.busy = self.control.abort = False
            self.control.ticket_head = 0
            self.control_addresses = _register(self.control, slab, mapped)
            self.pool = pool_tensor(slab, opened.num_slots, opened.slot_bytes, device)
            self._mapped = mapped.pop_all()
        self._records = list(self.pool[:, :record_bytes].unbind())
        self._asked: dict[int, _Demand] = {}  # by request, those of a running GPU
        self._announced: dict[int, frozenset[int]] = {}  # by layer, what was last asked for ahead of its look-up
        self._working = WorkingTime()
        self._judged_at = 0.0

    @classmethod
    def open(
        cls,
        client: BlockingClient,
        *,
        fingerprint: str,
        device: str,
        record_bytes: int,
        prefetch: PrefetchConfig,
        counters: ExpertCounters,
    ) -> SharedExperts:
        """Ask expertd for its pool and map it.

        Raises:
            ServiceError: expertd refuses (another worker holds the pool, other checkpoint, still starting).
            PeerLost: it went away before its memory was mapped.
            ConfigError: the pool is not where `device` computes.
            CapacityError: the pool cannot be mapped, or the GPU cannot be given the control block.
        """
        reply = client.call(OpenPool(fingerprint, device), timeout_s=FETCH_TIMEOUT_S)
        if not isinstance(reply, PoolOpened):
            raise ServiceError(ErrorCode.INTERNAL, f"expertd answered OpenPool with {type(reply).__name__}")
        return cls(client, reply, device, record_bytes, prefetch, counters)

    @property
    def wave_experts(self) -> int:
        return self._wave_experts

    @contextmanager
    def step(self) -> Iterator[None]:
        self.control.busy = True
        try:
            yield
            self._client.poll(0.0)  # if expertd has let go of us, slots may have changed under this step: PeerLost
        finally:
            for request_id in self._asked:
                self._client.forget(request_id)
            self._asked.clear()
            self._go_on()
            self.control.busy = False

    def look_up(self, layer: int, expert_ids: Sequence[int], ahead: Sequence[int] = ()) -> SharedLookUp:
        clock = int(self.control.worker_clock)
        row = self.control.slot_table[layer]
        slots = row[list(expert_ids)].tolist()
        self.control.uses[layer, list(expert_ids)] += 1
        hits = {e: self._records[s] for e, s in zip(expert_ids, slots, strict=True) if s >= 0}
        missing = tuple(e for e, s in zip(expert_ids, slots, strict=True) if s < 0)
        self._look_ahead.looked_up(layer, expert_ids, self._working.seconds)
        self._counters.lookups += len(expert_ids)
        self._counters.resident += len(hits)
        held = tuple(s for s in slots if s >= 0)
        demand = self._demand(layer, missing, held, clock) if missing else None
        if ahead:
            self._fetch_ahead(layer, ahead, clock + 1)
        return SharedLookUp(self, layer, hits, missing, demand)

    def hint(self, layer: int, expert_ids: Sequence[int]) -> None:
        if not self._prefetch.hash_layers:
            return
        row = self.control.slot_table[layer]
        if wanted := tuple(e for e in expert_ids if row[e] < 0):
            self.pass_hint(layer, wanted)

    def guess(self, layer: int, choose: Callable[[], Sequence[int]]) -> None:
        if not (self._prefetch.look_ahead and self._look_ahead.may_guess()):
            return
        row = self.control.slot_table[layer]
        if wanted := tuple(e for e in choose() if row[e] < 0):
            self.pass_hint(layer, wanted, is_guess=True)
            self._look_ahead.guessed(layer, wanted, self._working.seconds)

    def pass_hint(self, layer: int, expert_ids: tuple[int, ...], is_guess: bool = False) -> None:
        """Tell expertd of experts that were found missing before their look-up."""
        self._counters.hint_messages += 1
        self._announced[layer] = frozenset(expert_ids)
        self._client.send(PrefetchHint(layer, expert_ids, is_guess))

    def judge_guesses(self, look_ups: int, guessed: int, right: int) -> bool:
        """Whether a GPU should go on guessing, after so many look-ups and guesses of absent experts, of which so many
        came true."""
        if look_ups:
            now = self._working.seconds
            self._look_ahead.was_ahead((now - self._judged_at) / look_ups)
            self._judged_at = now
        self._look_ahead.score(guessed, right)
        return self._look_ahead.may_guess(look_ups)

    def ask(self, layer: int, expert_ids: tuple[int, ...], held_slots: tuple[int, ...], clock: int) -> None:
        """Send for experts that a kernel found missing; it sees the answer in the slot table."""
        demand = self._demand(layer, expert_ids, held_slots, clock)
        self._asked[demand.request_id] = demand
        self._working.stop()

    def take_answers(self) -> None:
        """Raises ServiceError or PeerLost if something that was asked for cannot be had."""
        while self._asked and (reply := self._client.poll(0.0)) is not None:
            request_id, message = reply
            demand = self._asked.pop(request_id, None)
            if isinstance(message, ErrorReply):
                raise _end_of_look_up(service_error(message))
            if demand is not None:
                self._arrived(demand)
        if not self._asked:
            self._go_on()
        elif time.perf_counter() - min(demand.sent for demand in self._asked.values()) > FETCH_TIMEOUT_S:
            raise PeerLost(f"expertd did not read an expert within {FETCH_TIMEOUT_S:g} s")

    def check_peer(self) -> None:
        """Between requests: raises PeerLost if expertd is gone."""
        self._client.poll(0.0)

    def close(self) -> None:
        """Unmap the pool, and tell expertd if it is still there."""
        self.control.abort = True  # what runs on a GPU must end, for nothing is mapped after this
        self.control.busy = False
        self._records.clear()
        self.pool = torch.empty((0, 0), dtype=torch.uint8)
        self._mapped.close()
        with suppress(ServiceError):  # gone or draining: the mapping was all that mattered
            self._client.call(ClosePool(), timeout_s=1.0)

    def _demand(self, layer: int, missing: tuple[int, ...], held_slots: tuple[int, ...], clock: int) -> _Demand:
        is_plain = len(missing) == 1 and missing[0] not in self._announced.get(layer, ())
        sent = time.perf_counter()
        return _Demand(self._fetch(FetchExperts(layer, missing, clock, held_slots)), sent, is_plain)

    def _go_on(self) -> None:
        self._counters.wait_seconds += self._working.go()

    def _arrived(self, demand: _Demand) -> None:
        if demand.is_plain:
            self._look_ahead.was_read(time.perf_counter() - demand.sent)

    def _fetch(self, message: FetchExperts) -> int:
        self._counters.fetch_messages += 1
        return self._client.start(message)

    def _fetch_ahead(self, layer: int, expert_ids: Sequence[int], clock: int) -> None:
        row = self.control.slot_table[layer]
        if missing := tuple(e for e in expert_ids if row[e] < 0):
            self._announced[layer] = frozenset(missing)
            self._client.forget(self._fetch(FetchExperts(layer, missing, clock, is_ahead=True)))

    def _collect(self, layer: int, missing: tuple[int, ...], demand: _Demand) -> dict[int, torch.Tensor]:
        self._working.stop()
        try:
            reply = self._client.finish(demand.request_id, timeout_s=FETCH_TIMEOUT_S)
        except ServiceError as error:
            raise _end_of_look_up(error) from error
        self._go_on()
        self._arrived(demand)
        if not isinstance(reply, ExpertsFetched):
            raise ServiceError(ErrorCode.INTERNAL, f"expertd answered FetchExperts with {type(reply).__name__}")
        slots = self.control.slot_table[layer, list(missing)].tolist()
        assert min(slots) >= 0, f"layer {layer}: fetched experts {missing} are not in the slot table: {slots}"
        return {e: self._records[s] for e, s in zip(missing, slots, strict=True)}

    def _tick(self) -> None:
        self.control.worker_clock += 1


class SharedLookUp:
    """One wave against the shared pool."""

    __slots__ = ("_demand", "_experts", "_layer", "_missing", "hits")

    def __init__(
        self,
        experts: SharedExperts,
        layer: int,
        hits: dict[int, torch.Tensor],
        missing: tuple[int, ...],
        demand: _Demand | None,
    ) -> None:
        self._experts = experts
        self._layer = layer
        self._missing = missing
        self._demand = demand
        self.hits: Mapping[int, torch.Tensor] = hits

    def wait(self) -> Mapping[int, torch.Tensor]:
        if self._demand is None:
            return {}
        return self._experts._collect(self._layer, self._missing, self._demand)

    def done(self) -> None:
        self._experts._tick()


def _end_of_look_up(error: ServiceError) -> ServiceError:
    """An expert that cannot be read ends a look-up for expertd too. After anything else it may believe that we stand
    still until it answers, and then uses slots at once; going on needs a new connection."""
    return error if error.code is ErrorCode.IO_ERROR else PeerLost(error.detail)


def _register(control: ControlBlock, slab: Slab, mapped: ExitStack) -> Addresses | None:
    """Let the GPU that the slab is on, if it is on one, see the control block too."""
    if isinstance(slab, HostSlab):
        return None
    from shared.cuda.host_memory import Registration
    from shared.memory.cuda_slab import CudaSlab

    assert isinstance(slab, CudaSlab)
    registration = Registration(slab.device, control.address, control.nbytes)
    mapped.callback(registration.close)
    return control.addresses(registration.device_address)
