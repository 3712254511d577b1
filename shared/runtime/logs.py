"""How log lines look. One event per line, `what key=value ...`; what happens per token or expert is stats, not log."""

from __future__ import annotations

import logging
import sys


def configure_logs(service: str, level: str, under_honcho: bool) -> None:
    """Send the process's log to stderr. honcho puts time and name in front of every line, so there both stay out."""
    line = "%(levelname)s %(message)s" if under_honcho else f"%(asctime)s {service} %(levelname)s %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(line))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
