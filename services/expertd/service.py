"""The expert daemon's shell: requests in, reader threads, the shared pool, statistics.

One lock guards the scheduler; reader threads take a load under it, read and land it without, and finish under it again.
A reader that finds loads but no slot looks again soon, because the worker's clock sends no signal.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import NamedTuple

from services.expertd.cache import ExpertCache
from services.expertd.heat import FILE_NAME, load_heat, save_heat
from services.expertd.landing import Landing, make_landing
from services.expertd.picture import Picture
from services.expertd.policy import POLICIES, Key
from services.expertd.pool import Pool
from services.expertd.reader import RecordReader
from services.expertd.reads import Reads, make_reads
from services.expertd.scheduler import Load, Scheduler, Urgency
from services.expertd.slots import Slots, WorkerView
from shared.checkpoint.manifest import record_checksums
from shared.checkpoint.records import ExpertRecords
from shared.errors import CheckpointError, DeviceError, ErrorCode, ServiceError
from shared.protocol.messages import (
    ClosePool,
    ExpertsFetched,
    FetchExperts,
    OpenPool,
    PoolClosed,
    PrefetchHint,
)
from shared.runtime.context import ServiceContext
from shared.transport.request import Request

log = logging.getLogger(__name__)

# How long a reader sleeps when a slot must come from the worker's clock, in seconds.
SLOT_POLL_S = 0.0005
USES_POLL_S = 0.02
HEAT_SAVE_S = 30.0
PROGRESS_S = 0.05
# Threads beyond the records that are read at a time: the drive stays busy while others are checked and copied.
COPYING = 2


class Lane(NamedTuple):
    """What one record on its way needs for itself."""

    landing: Landing
    reads: Reads


class ExpertService:
    """Everything between expertd's sockets, the disk and the pool."""

    def __init__(self, context: ServiceContext, records: ExpertRecords, pool: Pool, fingerprint: str) -> None:
        config = context.config
        self._context = context
        self._records = records
        self._pool = pool
        self._fingerprint = fingerprint
        self._heat_path = config.run_dir / FILE_NAME if config.cache.save_heat else None
        checksums = record_checksums(config.model.path) if config.reader.verify else None
        self._reader = RecordReader(config.reader.direct, config.reader.threads, checksums)
        self._reader.open(records.files)
        self._policy_name = config.cache.policy
        self._cache = ExpertCache(pool.num_slots * pool.slot_bytes, POLICIES[config.cache.policy]())
        self._slots = Slots(pool.num_slots)
        self._scheduler: Scheduler[Request] = Scheduler(
            self._cache, self._slots, pool, pool.slot_bytes, pool.reserve, self._look
        )
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._worker: bytes | None = None
        self._is_stopping = False
        self._seen = pool.control.uses.copy()
        self._bytes_read = 0
        self._io_seconds = 0.0
        self._misses_by_layer = [0] * pool.layers
        self._picture = Picture(pool.layers, pool.experts)
        num_threads = config.reader.threads + COPYING
        self._lanes = [Lane(make_landing(pool.slab, pool.slot_bytes), reads) for reads in make_reads(num_threads)]
        # The one that was left last is taken first: its memory may still be in the processor's cache.
        self._free_lanes = list(self._lanes)
        self._threads = [threading.Thread(target=self._read_loop, name=f"reader {i}") for i in range(num_threads)]

    # --- requests, in the socket's thread ------------------------------------------------------------------------

    def handle(self, request: Request) -> None:
        message = request.message
        with self._lock:
            if isinstance(message, OpenPool):
                self._open_pool(request, message)
            elif request.peer != self._worker:
                raise ServiceError(ErrorCode.BAD_REQUEST, "open the pool first")
            elif isinstance(message, FetchExperts):
                self._fetch(request, message)
            elif isinstance(message, PrefetchHint):
                self._check_ids(message.layer, message.expert_ids)
                self._scheduler.hint(message.layer, message.expert_ids, message.is_guess)
                self._work.notify(len(message.expert_ids))
            elif isinstance(message, ClosePool):
                self._detach()
                request.reply(PoolClosed())
            else:
                raise ServiceError(ErrorCode.UNSUPPORTED, f"expertd does not answer {type(message).__name__}")

    def peer_lost(self, peer: bytes) -> None:
        """A connection is gone; if it was the worker's, so are its pins and its wishes."""
        with self._lock:
            if peer == self._worker:
                log.warning("worker lost, the cache stays")
                self._detach()

    def _open_pool(self, request: Request, message: OpenPool) -> None:
        if message.fingerprint != self._fingerprint:
            raise ServiceError(
                ErrorCode.BAD_REQUEST, "the worker has another checkpoint open than expertd; restart both on one config"
            )
        if message.device != self._pool.device:
            raise ServiceError(
                ErrorCode.BAD_REQUEST, f"the worker computes on {message.device}, the pool is on {self._pool.device}"
            )
        if self._worker is not None and self._worker != request.peer:
            raise ServiceError(
                ErrorCode.NO_CAPACITY, f"another worker, connection {self._worker.hex()}, holds the pool; stop it first"
            )
        self._worker = request.peer
        log.info("worker attached")
        request.reply(self._pool.opened(self._context.identity.boot_id))

    def _fetch(self, request: Request, message: FetchExperts) -> None:
        self._check_look_up(message)
        self._observe_uses(message.layer, message.expert_ids)  # before they are there, and no others: a worker waits
        before = self._scheduler.counters.misses
        is_answered = self._scheduler.fetch(
            request, message.layer, message.expert_ids, message.held_slots, message.clock, message.is_ahead
        )
        self._misses_by_layer[message.layer] += self._scheduler.counters.misses - before
        if is_answered:
            request.reply(ExpertsFetched())
        else:
            self._work.notify(len(message.expert_ids))  # more readers would only be in these ones' way

    def _check_look_up(self, message: FetchExperts) -> None:
        self._check_ids(message.layer, message.expert_ids)
        if len(set(message.expert_ids)) < len(message.expert_ids):
            raise ServiceError(ErrorCode.BAD_REQUEST, "a look-up names an expert twice")
        count, limit = len(message.expert_ids) + len(message.held_slots), self._pool.wave_experts
        if count > limit:
            raise ServiceError(ErrorCode.BAD_REQUEST, f"a look-up of {count} experts; this pool allows {limit}")

    def _check_ids(self, layer: int, expert_ids: tuple[int, ...]) -> None:
        layers, experts = self._pool.control.slot_table.shape
        if not 0 <= layer < layers:
            raise ServiceError(ErrorCode.BAD_REQUEST, f"layer {layer} is not one of {layers}")
        if outside := [e for e in expert_ids if not 0 <= e < experts]:
            raise ServiceError(ErrorCode.BAD_REQUEST, f"expert {outside[0]} is not one of {experts}")

    def _detach(self) -> None:
        self._worker = None
        for request in self._scheduler.worker_lost():
            request.fail(ErrorCode.CANCELLED, "the worker let go of the pool")
        self._work.notify_all()

    # --- the pool's other user -----------------------------------------------------------------------------------

    def _look(self) -> WorkerView:
        control = self._pool.control
        now = time.monotonic()  # first, so that the flags are never older than the time they are said to be of
        return WorkerView(control.worker_clock, control.busy, self._worker is not None, now)

    def _observe_uses(self, layer: int, expert_ids: tuple[int, ...]) -> None:
        uses, seen = self._pool.control.uses[layer], self._seen[layer]
        for expert in expert_ids:
            if (gain := int(uses[expert] - seen[expert])) > 0:
                self._cache.use(Key(layer, expert), gain)
                seen[expert] += gain

    def _observe_all_uses(self) -> None:
        """Hits cost no message: the policy learns of them from the worker's counts."""
        for layer, experts in enumerate(self._pool.control.uses > self._seen):
            self._observe_uses(layer, tuple(experts.nonzero()[0].tolist()))

    # --- reader threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _read_loop(self) -> None:
        for lane in self._lanes:
            lane.landing.enter_thread()
        while (taken := self._take()) is not None:
            self._read(*taken)

    def _take(self) -> tuple[Load[Request], Lane] | None:
        """The next load, waited for, and its lane; None when the service stops."""
        with self._lock:
            while not self._is_stopping:
                load = self._scheduler.next()
                has_next = self._scheduler.has_next
                if load is not None:
                    if has_next:
                        self._work.notify()  # what waited for the end of another load may need a second reader
                    return load, self._free_lanes.pop()
                self._work.wait(SLOT_POLL_S if has_next else None)
            return None

    def _read(self, load: Load[Request], lane: Lane) -> None:
        started = time.perf_counter()
        error: Exception | None = None
        nbytes = 0
        try:
            plan = self._records.plan(load.key.layer, load.key.expert)
            with lane.landing.into(load.slot) as slot:
                nbytes = self._reader.read(plan, slot, lane.reads)
        except (CheckpointError, DeviceError) as failure:
            log.error("read failed layer=%d expert=%d: %s", load.key.layer, load.key.expert, failure)
            error = failure
        elapsed = time.perf_counter() - started
        with self._lock:
            self._bytes_read += nbytes
            self._io_seconds += elapsed
            ended = self._scheduler.finish(load, is_read=error is None)
            self._free_lanes.append(lane)
        for request in ended:
            if error is None:
                request.reply(ExpertsFetched())
            else:
                request.fail(ErrorCode.IO_ERROR, str(error))
        if isinstance(error, DeviceError) and not lane.landing.is_alive():
            raise error  # nothing can be read any more: the service ends

    # --- the main thread -----------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Read the experts that were hottest when the service last stopped, in the order of their files.

        The readers must run and nobody else ask. One that cannot be read is left out.
        """
        if self._heat_path is None:
            return
        uses = load_heat(self._heat_path, self._fingerprint, self._pool.layers, self._pool.experts)
        hottest = sorted(uses, key=lambda key: -uses[key])[: self._pool.num_slots - self._pool.reserve]
        with self._lock:
            for key in sorted(hottest, key=self._place_on_disk):
                # Old heat fades: it must not outweigh what is used now.
                self._scheduler.warm(key, max(1, uses[key] // 2))
            self._work.notify_all()
        while left := self._scheduler.unfinished:
            done, total, size = len(hottest) - left, len(hottest), self._records.layout.record_bytes
            self._context.progress(f"warming the cache: {done} of {total} experts", done * size, total * size)
            if self._context.wait(PROGRESS_S):
                return

    def _place_on_disk(self, key: Key) -> tuple[Path, int]:
        first = self._records.plan(key.layer, key.expert).extents[0]
        return first.file, first.offset

    def run(self) -> None:
        """Until the context stops: watch the use counts, and save the heat now and then."""
        next_save = time.monotonic() + HEAT_SAVE_S
        while not self._context.wait(USES_POLL_S):
            with self._lock:
                self._observe_all_uses()
            if time.monotonic() >= next_save:
                self._save_heat()
                next_save = time.monotonic() + HEAT_SAVE_S

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._save_heat()
        self._reader.close()
        for lane in self._lanes:
            lane.landing.close()
            lane.reads.close()

    def _save_heat(self) -> None:
        if self._heat_path is not None:
            with self._lock:
                uses = self._cache.uses()
            save_heat(self._heat_path, self._fingerprint, uses)

    # --- statistics ----------------------------------------------------------------------------------------------

    def picture(self) -> bytes:
        """`StatsSnapshot.picture`, for one thread."""
        return self._picture.take(self._pool.control.slot_table, self._pool.control.uses)

    def stats(self) -> tuple[dict[str, float], dict[str, str]]:
        """Counters and gauges, and labels.

        Cumulative, in experts: `uses` by look-ups, of which `misses` had to be read and `late_hits` were asked for but
        resident or being read by then; `prefetched` were read before a look-up missed them; `evictions` lost their
        place; `read_errors` could not be read. `bytes_read` and `io_seconds` are those of reads; reads that overlap
        each count in full.

        Gauges: loads that wait for a thread, `queue_demand` for a look-up and `queue_prefetch` for a later one, and
        those `in_flight`; slots in all, resident, free, and `slots_retired`, which the worker may still read;
        `record_bytes` of one expert; `moe_layers`, of which the first `backbone_layers` are no MTP block, and `experts`
        of each; `worker_attached`, 0 or 1. Of layer n, `heat.n` is how many experts are resident, `uses.n` and
        `misses.n` its share of those counters.
        """
        with self._lock:
            counters, scheduler = self._scheduler.counters, self._scheduler
            values: dict[str, float] = {
                "misses": counters.misses,
                "late_hits": counters.late_hits,
                "prefetched": counters.prefetched,
                "evictions": counters.evictions,
                "read_errors": counters.read_errors,
                "bytes_read": self._bytes_read,
                "io_seconds": self._io_seconds,
                "queue_demand": scheduler.queued(Urgency.DEMAND),
                "queue_prefetch": sum(map(scheduler.queued, (Urgency.AHEAD, Urgency.HINT, Urgency.GUESS))),
                "in_flight": scheduler.in_flight,
                "slots_total": self._slots.num_slots,
                "slots_resident": len(self._cache),
                "slots_free": self._slots.num_free,
                "slots_retired": self._slots.num_retired,
                "record_bytes": self._records.layout.record_bytes,
                "moe_layers": self._pool.layers,
                "backbone_layers": self._pool.backbone_layers,
                "experts": self._pool.experts,
                "worker_attached": float(self._worker is not None),
            }
            misses = list(self._misses_by_layer)
        uses = self._pool.control.uses.sum(axis=1).tolist()
        resident = (self._pool.control.slot_table >= 0).sum(axis=1).tolist()
        values["uses"] = sum(uses)
        for layer in range(self._pool.layers):
            values[f"heat.{layer}"] = resident[layer]
            values[f"uses.{layer}"] = uses[layer]
            values[f"misses.{layer}"] = misses[layer]
        return values, {
            "policy": self._policy_name,
            "direct": "yes" if self._reader.is_direct else "no",
            "checkpoint": self._context.config.model.path.name,
        }
