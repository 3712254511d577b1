"""Which experts were used most, kept across restarts, so that a new start begins warm.

A small JSON file in the run directory, bound to the checkpoint's fingerprint. It is only advice: a damaged or foreign
one is ignored.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from services.expertd.policy import Key

log = logging.getLogger(__name__)

FILE_NAME = "heat.json"


def save_heat(path: Path, fingerprint: str, uses: Mapping[Key, int]) -> None:
    """Replace the file atomically. A disk that cannot take it costs a log line and nothing else."""
    table = {"fingerprint": fingerprint, "uses": [[key.layer, key.expert, count] for key, count in uses.items()]}
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(json.dumps(table), encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        log.warning("heat not saved file=%s error=%s", path, error.strerror)


def load_heat(path: Path, fingerprint: str, layers: int, experts: int) -> dict[Key, int]:
    """Use counts by expert; empty if there is no file that fits this checkpoint."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["fingerprint"] != fingerprint:
            log.info("heat of another checkpoint ignored file=%s", path)
            return {}
        uses = {Key(int(layer), int(expert)): int(count) for layer, expert, count in table["uses"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        log.warning("damaged heat ignored file=%s error=%s", path, type(error).__name__)
        return {}
    return {key: count for key, count in uses.items() if 0 <= key.layer < layers and 0 <= key.expert < experts}
