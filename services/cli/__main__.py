"""The `icebox` command: finds the subcommand.

Only the chosen subcommand's module is imported, so that a command starts as fast as what it needs. What takes time to
import is imported where Ctrl-C is an ordinary end.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from services.cli.outcome import run_to_end

if TYPE_CHECKING:
    import typer

# Each is a function, or a group of commands, of the same name in services.cli.<name>; shown in this order.
COMMANDS = (
    *("up", "wait", "chat", "status", "monitor", "logits", "synth", "verify", "pack", "plan", "doctor", "eval"),
    "bench",
)
# Programs of their own behind a subcommand: every option is theirs, --help included.
PASSED_ON = ("logits", "eval")
_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}


def main() -> None:
    """Entry point of the console script; leaves by SystemExit."""
    run_to_end(_run)


def _run() -> None:
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    build([chosen] if chosen in COMMANDS else COMMANDS)(prog_name="icebox")


def build(names: Iterable[str]) -> typer.Typer:
    """The command line with these subcommands."""
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, callback=_icebox)
    for name in names:
        function = getattr(importlib.import_module(f"services.cli.{name}"), name)
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name)
            continue
        passed_on = name in PASSED_ON
        app.command(name, context_settings=_ANYTHING if passed_on else None, add_help_option=not passed_on)(function)
    return app


def _icebox() -> None:
    """Run Mixture-of-Experts models larger than memory."""


if __name__ == "__main__":
    main()
