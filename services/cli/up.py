"""`icebox up`: checks what can be checked before anything starts, then becomes `honcho start`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from services.cli.options import ConfigOption, chosen_config
from shared.checkpoint.config import ModelConfig
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

# The Procfile says `python`: that must be this one, whether or not its environment is active.
_START = 'PATH="$1:$PATH" ICEBOX_CONFIG="$2" exec "$3" -m honcho start -d "$4" -f "$4/Procfile"'


def up(config: ConfigOption = None) -> None:
    """Check the config and run all three services in this terminal until Ctrl-C."""
    settings = chosen_config(config)
    ModelConfig.from_dir(settings.model.path)
    if not (ROOT / "Procfile").is_file():
        raise ConfigError(f"{ROOT / 'Procfile'}: no such file; run `icebox up` from a source checkout")
    sys.stdout.flush()
    python = sys.executable
    os.execvp("sh", ["sh", "-c", _START, "icebox", str(Path(python).parent), str(settings.source), python, str(ROOT)])
