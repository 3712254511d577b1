"""What the services' counters mean: two snapshots of each become rates, shares and gauges. Pure, no I/O, no drawing.

"Now" figures come from the difference of the two snapshots, totals from the newer one. A service that is absent, that
was restarted in between, or that did nothing has no "now" figures: they are None, not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.protocol.messages import Pong, StatsSnapshot

ABSENT = "not running"


@dataclass(frozen=True, slots=True)
class Window:
    """An older and a newer snapshot of one service; the older is missing at first and after a restart."""

    old: StatsSnapshot | None
    new: StatsSnapshot

    def total(self, key: str) -> float:
        return self.new.values.get(key, 0.0)

    def gained(self, key: str) -> float | None:
        """By how much a counter grew; None without an older snapshot of the same process."""
        if self.old is None or self.old.boot_id != self.new.boot_id:
            return None
        return self.total(key) - self.old.values.get(key, 0.0)

    def rate(self, key: str) -> float | None:
        """Growth per second."""
        gained = self.gained(key)
        seconds = self.new.time_s - self.old.time_s if self.old is not None else 0.0
        return gained / seconds if gained is not None and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class ServiceView:
    name: str
    state: str
    detail: str
    pid: int | None
    uptime_s: float | None


@dataclass(frozen=True, slots=True)
class LayerView:
    """`served` is the share of uses now that were no miss, `served_total` since the start; None without uses.

    `is_mtp`: a block behind the backbone, which decoding does not use.
    """

    layer: int
    is_mtp: bool
    resident: int
    experts: int
    served: float | None
    served_total: float | None


@dataclass(frozen=True, slots=True)
class CacheView:
    """Expert cache and reads. Sizes in bytes; shares of expert uses from 0 to 1."""

    policy: str
    hit_rate: float | None
    late_rate: float | None
    miss_rate: float | None
    hit_rate_total: float | None
    uses: int
    misses: int
    late_hits: int
    uses_per_s: float | None
    bytes_per_s: float | None
    bytes_read: int
    evictions_per_s: float | None
    evictions: int
    prefetched: int
    read_errors: int
    queue_demand: int
    queue_prefetch: int
    in_flight: int
    slots_total: int
    slots_resident: int
    slots_free: int
    slots_retired: int
    pool_bytes: int
    layers: tuple[LayerView, ...]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Generation. `tokens_per_s` is by the clock; the decode and prefill speeds count only time spent in them.

    `cached_tokens` of prompts were kept from before and not read again; `session_hits` prompts had some. `guessed`
    experts of next layers were asked for ahead, the share `guesses_right` of them was then used.
    """

    tokens_per_s: float | None
    decode_tokens_per_s: float | None
    decode_tokens_per_s_total: float | None
    prefill_tokens_per_s_total: float | None
    waiting_share: float | None
    running: int
    waiting: int
    done: int
    failed: int
    cancelled: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    state_bytes: int
    session_hits: int
    session_bytes: int
    session_limit_bytes: int
    session_disk_bytes: int
    guessed: int
    guesses_right: float | None


@dataclass(frozen=True, slots=True)
class FrontView:
    """Requests of people. `ttft_s` is the mean now, `ttft_s_total` since the start."""

    ttft_s: float | None
    ttft_s_total: float | None
    running: int
    waiting: int
    done: int
    failed: int
    cancelled: int
    refused: int


@dataclass(frozen=True, slots=True)
class View:
    services: tuple[ServiceView, ...]
    cache: CacheView | None
    worker: WorkerView | None
    front: FrontView | None


def make_view(pongs: Mapping[str, Pong | None], windows: Mapping[str, Window]) -> View:
    """Everything there is to show; a part is None while its service has said nothing."""
    expertd, worker, front = (windows.get(name) for name in ("expertd", "worker", "front"))
    return View(
        services=tuple(_service(name, pong) for name, pong in pongs.items()),
        cache=_cache(expertd) if expertd else None,
        worker=_worker(worker) if worker else None,
        front=_front(front) if front else None,
    )


def _service(name: str, pong: Pong | None) -> ServiceView:
    if pong is None:
        return ServiceView(name, ABSENT, "", None, None)
    return ServiceView(name, pong.state, pong.detail, pong.pid, pong.uptime_s)


def _cache(window: Window) -> CacheView:
    def share(key: str) -> float | None:
        return _ratio(window.gained(key), window.gained("uses"))

    def count(key: str) -> int:
        return int(window.total(key))

    late, missed = share("late_hits"), share("misses")
    uses, misses, late_hits = count("uses"), count("misses"), count("late_hits")
    return CacheView(
        policy=window.new.labels.get("policy", ""),
        hit_rate=None if late is None or missed is None else max(0.0, 1.0 - late - missed),
        late_rate=late,
        miss_rate=missed,
        hit_rate_total=_ratio(uses - misses - late_hits, uses),
        uses=uses,
        misses=misses,
        late_hits=late_hits,
        uses_per_s=window.rate("uses"),
        bytes_per_s=window.rate("bytes_read"),
        bytes_read=count("bytes_read"),
        evictions_per_s=window.rate("evictions"),
        evictions=count("evictions"),
        prefetched=count("prefetched"),
        read_errors=count("read_errors"),
        queue_demand=count("queue_demand"),
        queue_prefetch=count("queue_prefetch"),
        in_flight=count("in_flight"),
        slots_total=count("slots_total"),
        slots_resident=count("slots_resident"),
        slots_free=count("slots_free"),
        slots_retired=count("slots_retired"),
        pool_bytes=count("slots_total") * count("record_bytes"),
        layers=tuple(_layer(window, layer) for layer in range(count("moe_layers"))),
    )


def _layer(window: Window, layer: int) -> LayerView:
    misses, uses = f"misses.{layer}", f"uses.{layer}"
    return LayerView(
        layer=layer,
        is_mtp=layer >= window.total("backbone_layers"),
        resident=int(window.total(f"heat.{layer}")),
        experts=int(window.total("experts")),
        served=_rest(_ratio(window.gained(misses), window.gained(uses))),
        served_total=_rest(_ratio(window.total(misses), window.total(uses))),
    )


def _worker(window: Window) -> WorkerView:
    busy = _sum(window.gained("prefill_seconds"), window.gained("decode_seconds"))
    return WorkerView(
        tokens_per_s=window.rate("generated_tokens"),
        decode_tokens_per_s=_ratio(window.gained("generated_tokens"), window.gained("decode_seconds")),
        decode_tokens_per_s_total=_ratio(window.total("generated_tokens"), window.total("decode_seconds")),
        prefill_tokens_per_s_total=_ratio(window.total("prompt_tokens"), window.total("prefill_seconds")),
        waiting_share=_ratio(window.gained("wait_seconds"), busy),
        running=int(window.total("requests_running")),
        waiting=int(window.total("requests_waiting")),
        done=int(window.total("requests_done")),
        failed=int(window.total("requests_failed")),
        cancelled=int(window.total("requests_cancelled")),
        prompt_tokens=int(window.total("prompt_tokens")),
        cached_tokens=int(window.total("cached_tokens")),
        generated_tokens=int(window.total("generated_tokens")),
        state_bytes=int(window.total("state_bytes")),
        session_hits=int(window.total("session_hits")),
        session_bytes=int(window.total("session_bytes")),
        session_limit_bytes=int(window.total("session_limit_bytes")),
        session_disk_bytes=int(window.total("session_disk_bytes")),
        guessed=int(window.total("guessed")),
        guesses_right=_ratio(window.total("guessed_right"), window.total("guessed")),
    )


def _front(window: Window) -> FrontView:
    return FrontView(
        ttft_s=_ratio(window.gained("ttft_seconds"), window.gained("ttft_count")),
        ttft_s_total=_ratio(window.total("ttft_seconds"), window.total("ttft_count")),
        running=int(window.total("requests_running")),
        waiting=int(window.total("requests_waiting")),
        done=int(window.total("requests_done")),
        failed=int(window.total("requests_failed")),
        cancelled=int(window.total("requests_cancelled")),
        refused=int(window.total("requests_refused")),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _rest(share: float | None) -> float | None:
    return None if share is None else max(0.0, 1.0 - share)


def _sum(first: float | None, second: float | None) -> float | None:
    return first + second if first is not None and second is not None else None
