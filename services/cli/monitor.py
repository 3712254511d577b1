"""`icebox monitor`: hands over to the monitor's own program."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from services.cli.options import ConfigOption, chosen_config


def monitor(
    config: ConfigOption = None,
    once: Annotated[bool, typer.Option("--once", help="One look instead of a live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print the numbers as JSON.")] = False,
) -> None:
    """Watch the running services: hit rate, heat, reads, queue, speed. Looking changes nothing."""
    settings = chosen_config(config)
    flags = ["--once"] * once + ["--json"] * as_json
    sys.stdout.flush()
    command = [sys.executable, "-m", "services.monitor", "--config", str(settings.source), *flags]
    os.execv(sys.executable, command)
