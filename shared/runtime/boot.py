"""Who a process is: the name of its service, and a random id that no other start of it has."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """A changed `boot_id` behind the same address means that everything shared with the old process is gone."""

    service: str
    boot_id: str


def make_identity(service: str) -> Identity:
    return Identity(service, secrets.token_hex(8))
