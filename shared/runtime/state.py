"""Where a service stands in its life, as Pong tells it."""

from __future__ import annotations

from enum import StrEnum


class ServiceState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
