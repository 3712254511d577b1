"""What every handler may use."""

from __future__ import annotations

from dataclasses import dataclass

from services.front.answers import Answers
from services.front.chat.format import ChatFormat
from shared.config import Config


@dataclass(frozen=True, slots=True)
class Front:
    """`model` is the name under which the API knows the one model that is served; `started` is in Unix seconds."""

    config: Config
    answers: Answers
    chat_format: ChatFormat
    model: str
    started: int
