"""Endpoints for those who run the server: health, statistics, metrics."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.front.http.front import Front
from services.front.http.sse import json_bytes
from shared.observation.view import ServiceView
from shared.runtime.state import ServiceState


def routes(front: Front) -> list[Route]:
    async def health(request: Request) -> Response:
        """200 if all services are ready, else 503 with which is not and why."""
        services = (await front.observer.look()).view.services
        waiting = [service for service in services if service.state != ServiceState.READY]
        body = {
            "ready": not waiting,
            "detail": "; ".join(map(_complaint, waiting)),
            "services": {service.name: {"state": service.state, "detail": service.detail} for service in services},
        }
        status = HTTPStatus.SERVICE_UNAVAILABLE if waiting else HTTPStatus.OK
        return Response(json_bytes(body), status, media_type="application/json")

    async def stats(request: Request) -> Response:
        """What `icebox monitor --once --json` prints."""
        look = await front.observer.look()
        return Response(json_bytes(asdict(look.view)), media_type="application/json")

    async def metrics(request: Request) -> Response:
        look = await front.observer.look()
        return Response(front.metrics.text(look.snapshots), headers={"content-type": CONTENT_TYPE_LATEST})

    return [Route("/health", health), Route("/stats", stats), Route("/metrics", metrics)]


def _complaint(service: ServiceView) -> str:
    return f"{service.name} is {service.state}" + (f" ({service.detail})" if service.detail else "")
