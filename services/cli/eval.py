"""`icebox eval`: hands over to the program that asks the demo's held-out questions of the running services."""

from __future__ import annotations

import os
import sys

import typer

from shared.errors import ConfigError

PROGRAM = "demo/evaluate_services.py"


def eval(context: typer.Context) -> None:
    """Ask held-out questions of the running services and print the table: see `icebox eval --help`."""
    if not os.path.isfile(PROGRAM):
        raise ConfigError(f"{PROGRAM}: no such file; run `icebox eval` from a source checkout")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "demo.evaluate_services", *context.args])
