"""Options that several commands share."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from shared.config import Config, default_config_path, load_config
from shared.errors import ConfigError

SERVICES = ("expertd", "worker", "front")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="The deployment's TOML file.", show_default="$ICEBOX_CONFIG or configs/demo.toml"
    ),
]


def chosen_config(path: Path | None) -> Config:
    """The config that the option, else the environment, names. Raises ConfigError."""
    if path is not None:
        return load_config(path)
    default = default_config_path()
    if not os.path.exists(default):
        raise ConfigError(f"{default}: no such config file; name one with --config or $ICEBOX_CONFIG")
    return load_config(default)


def check_output(path: Path) -> None:
    """Raises ConfigError if no file can be written there: better before long work than after. Changes nothing."""
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); name another file") from error


def finite(value: float | None) -> float | None:
    """For options whose bounds let infinity or NaN through. Raises typer.BadParameter."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
