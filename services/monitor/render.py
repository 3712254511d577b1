"""The view as text for a terminal: one table a service, and a bar for every layer's share of resident experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shared.observation.view import CacheView, FrontView, LayerView, ServiceView, View, WorkerView
from shared.readable import readable_bytes

BAR_CELLS = 12
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow"}


def render(view: View) -> RenderableType:
    """Everything; parts whose service says nothing are left out."""
    parts: list[RenderableType] = [_services(view.services)]
    if view.worker:
        parts.append(_facts("worker", _worker(view.worker)))
    if view.front:
        parts.append(_facts("front", _front(view.front)))
    if view.cache:
        parts.append(_facts("cache", _cache(view.cache)))
        parts.append(Columns([_layer(layer) for layer in view.cache.layers], padding=(0, 3)))
    return Group(*parts)


def _services(services: Sequence[ServiceView]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for service in services:
        process = "" if service.pid is None else f"pid {service.pid}, up {service.uptime_s:.0f} s"
        state = Text(service.state, style=_COLOURS.get(service.state, "red"))
        table.add_row(Text(service.name, style="bold"), state, process, Text(service.detail))
    return table


def _facts(name: str, lines: Sequence[str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for i, line in enumerate(lines):
        table.add_row(Text("" if i else f"{name:7}", style="bold"), Text(line))
    return table


def _worker(worker: WorkerView) -> list[str]:
    is_idle = not worker.tokens_per_s and not worker.running
    return [
        joined(
            "idle" if is_idle else f"{number(worker.tokens_per_s)} tokens/s now",
            said("decode {} now", worker.decode_tokens_per_s),
            said("decode {} since start", worker.decode_tokens_per_s_total),
            said("prefill {}", worker.prefill_tokens_per_s_total),
            said("waits for experts {} of its time", worker.waiting_share, percent),
        ),
        f"{worker.running} running, {worker.waiting} waiting, {worker.done} done, {worker.failed} failed, "
        f"{worker.cancelled} cancelled; {worker.prompt_tokens:,} tokens read, {worker.generated_tokens:,} written; "
        f"state {size(worker.state_bytes)}",
        f"{worker.guessed:,} experts of next layers guessed"
        + said(", {} of them right", worker.guesses_right, percent),
        f"sessions: {worker.cached_tokens:,} tokens of {worker.session_hits:,} prompts were not read again; "
        f"{size(worker.session_bytes)} of {size(worker.session_limit_bytes)} kept"
        + (f", {size(worker.session_disk_bytes)} on disk" if worker.session_disk_bytes else ""),
    ]


def _front(front: FrontView) -> list[str]:
    return [
        joined(
            said("first token after {} s now", front.ttft_s),
            said("first token after {} s since start", front.ttft_s_total),
            f"{front.running} running, {front.waiting} waiting, {front.done} done, {front.failed} failed, "
            f"{front.cancelled} cancelled, {front.refused} refused",
        )
    ]


def _cache(cache: CacheView) -> list[str]:
    used = cache.slots_resident / cache.slots_total if cache.slots_total else 0.0
    served = (
        f"{percent(cache.hit_rate)} hits, {percent(cache.late_rate)} late, {percent(cache.miss_rate)} misses of "
        f"{number(cache.uses_per_s)} uses/s"
    )
    now = joined(
        "no uses" if cache.hit_rate is None else served,
        said("reads {}/s", cache.bytes_per_s, size),
        said("{} evictions/s", cache.evictions_per_s),
    )
    return [
        f"now: {'idle' if cache.hit_rate is None and not cache.bytes_per_s else now}",
        f"since start: {said('{} hits of ', cache.hit_rate_total, percent)}{cache.uses:,} uses; "
        f"{cache.late_hits:,} late, "
        f"{cache.misses:,} misses, {cache.evictions:,} evictions, {cache.prefetched:,} prefetched, "
        f"{size(cache.bytes_read)} read, {cache.read_errors} read errors",
        f"pool {bar(used)} {cache.slots_resident} of {cache.slots_total} slots hold an expert "
        f"({size(cache.pool_bytes)}, {cache.slots_free} free, {cache.slots_retired} retired), policy {cache.policy}; "
        f"queue {cache.queue_demand} demand, {cache.queue_prefetch} prefetch, {cache.in_flight} in flight",
    ]


def _layer(layer: LayerView) -> Text:
    heat = layer.resident / layer.experts if layer.experts else 0.0
    served = layer.served_total if layer.served is None else layer.served
    name = "MTP" if layer.is_mtp else f"{layer.layer:3}"
    return Text(f"{name} {bar(heat)} {layer.resident:3}/{layer.experts} served {percent(served):>6}")


def bar(share: float) -> str:
    """A share from 0 to 1 as `BAR_CELLS` cells, to an eighth of a cell."""
    eighths = round(min(1.0, max(0.0, share)) * BAR_CELLS * 8)
    cells = [_EIGHTHS[min(8, max(0, eighths - 8 * i))] for i in range(BAR_CELLS)]
    return "▕" + "".join(cells) + "▏"


def joined(*parts: str) -> str:
    """Those that say something."""
    return "; ".join(part for part in parts if part)


def number(value: float | None) -> str:
    """Three digits or so; a dash if there is nothing to say."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def said(text: str, value: float | None, shown: Callable[[float], str] = number) -> str:
    """The text with a figure at its {}; nothing if there is none."""
    return "" if value is None else text.format(shown(value))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def size(count: float | None) -> str:
    return "-" if count is None else readable_bytes(count)
