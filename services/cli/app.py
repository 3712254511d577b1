"""The command line: which subcommands there are, and the modules that hold them.

Only the chosen subcommand's module is imported, so that a command starts as fast as what it needs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable
from typing import Annotated

import typer

# Each is a function, or a group of commands, of the same name in services.cli.<name>; shown in this order.
COMMANDS = (
    *("up", "wait", "chat", "status", "monitor", "logits", "synth", "verify", "pack", "plan", "doctor", "eval"),
    "bench",
)
# Programs of their own behind a subcommand: every option is theirs, --help included.
PASSED_ON = ("logits", "eval")
_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}


def run(first_argument: str) -> None:
    """Do what the command line says; only the subcommand that it begins with can be chosen, if it is one."""
    build([first_argument] if first_argument in COMMANDS else COMMANDS)(prog_name="icebox")


def build(names: Iterable[str]) -> typer.Typer:
    """The command line with these subcommands."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, callback=_icebox)
    for name in names:
        function = getattr(importlib.import_module(f"services.cli.{name}"), name)
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name)
            continue
        passed_on = name in PASSED_ON
        app.command(name, context_settings=_ANYTHING if passed_on else None, add_help_option=not passed_on)(function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"icebox {importlib.metadata.version('icebox')}")
        raise typer.Exit


def _icebox(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and leave.")
    ] = False,
) -> None:
    """Run Mixture-of-Experts models larger than memory."""
