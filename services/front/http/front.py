"""What every handler may use."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.front.answers import Answers
from services.front.http.metrics import HttpMetrics
from services.front.http.observer import Observer
from shared.config import Config


@dataclass(frozen=True, slots=True)
class Front:
    """`model` is the name under which the API knows the one model that is served; `started` is in Unix seconds."""

    config: Config
    answers: Answers
    observer: Observer
    model: str
    started: int
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
