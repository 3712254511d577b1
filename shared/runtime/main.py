"""What every `python -m services.X` does: read `--config`, then run the service's main function to its exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shared.config import load_config
from shared.errors import IceboxError
from shared.runtime.service import Main, run_service


def service_main(name: str, description: str | None, main: Main) -> int:
    """The exit code of the service `name`; a config that cannot be used is one line on stderr."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{name}", description=description)
    parser.add_argument("--config", type=Path, required=True)
    try:
        config = load_config(parser.parse_args().config)
    except IceboxError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    return run_service(name, config, main)
