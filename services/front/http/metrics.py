"""Prometheus' view: every counter and gauge that the services publish, and what the HTTP side counts itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import InfoMetricFamily, UntypedMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.protocol.messages import StatsSnapshot


class HttpMetrics:
    """Counts responses; one per application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._responses = Counter(
            "icebox_http_responses", "Responses by endpoint and status", ("endpoint", "status"), registry=self._registry
        )

    def count(self, endpoint: str, status: int) -> None:
        self._responses.labels(endpoint, str(status)).inc()

    def text(self, snapshots: Mapping[str, StatsSnapshot]) -> bytes:
        """Text format 0.0.4: own counts and those of the services."""
        services = CollectorRegistry()
        services.register(_Published(snapshots))
        return generate_latest(self._registry) + generate_latest(services)


class CountResponses:
    """Middleware: one count per response that has begun."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = getattr(scope.get("endpoint"), "__name__", "none")
                self._metrics.count(endpoint, message["status"])
            await send(message)

        await self._app(scope, receive, counting)


class _Published(Collector):
    """Snapshots as metrics: `misses.3` of expertd is icebox_expertd_misses{index="3"}. Their types are not known."""

    def __init__(self, snapshots: Mapping[str, StatsSnapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[UntypedMetricFamily | InfoMetricFamily]:
        for service, snapshot in self._snapshots.items():
            info = InfoMetricFamily(f"icebox_{service}", f"What {service} serves")
            info.add_metric([], dict(snapshot.labels))
            yield info
            yield from _families(service, snapshot.values)


def _families(service: str, values: Mapping[str, float]) -> Iterator[UntypedMetricFamily]:
    families: dict[tuple[str, bool], UntypedMetricFamily] = {}
    for key, value in values.items():
        name, _, index = key.partition(".")
        labels = ["index"] if index else []
        # A total and its parts cannot be one metric.
        full = f"icebox_{service}_{name}" + ("_by_index" if index and name in values else "")
        family = families.setdefault(
            (name, bool(index)), UntypedMetricFamily(full, f"{name} of {service}", None, labels)
        )
        family.add_metric([index] if index else [], value)
    yield from families.values()
