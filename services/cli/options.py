"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shared.config import Config, default_config_path, load_config

SERVICES = ("expertd", "worker", "front")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="The deployment's TOML file.", show_default="$ICEBOX_CONFIG or configs/demo.toml"
    ),
]


def chosen_config(path: Path | None) -> Config:
    """The config that the option, else the environment, names. Raises ConfigError."""
    return load_config(path or default_config_path())
