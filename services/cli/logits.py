"""`icebox logits`: hands over to the worker's own program, which needs no service."""

from __future__ import annotations

import os
import sys

import typer


def logits(context: typer.Context) -> None:
    """Teacher-forced logits of a checkpoint, to compare with recorded ones: see `icebox logits --help`."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "services.worker.logits", *context.args])
