"""`icebox doctor`: look at this machine, say what would get in the way, and plan a deployment if one is named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from services.cli.plan import plan_json, show
from shared.checkpoint.config import ModelConfig
from shared.config import gpu_ordinal, load_config
from shared.errors import ExitCode
from shared.planning.checks import Finding, Level, examine
from shared.planning.machine import load_machine, probe
from shared.planning.plan import make_plan

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(
    config: Annotated[Path | None, typer.Argument(help="A deployment to plan; its disk is the one measured.")] = None,
    path: Annotated[Path, typer.Option(help="Without a config: the checkpoint or disk to measure.")] = Path("."),
    machine: Annotated[Path | None, typer.Option(help="Examine a machine described in this TOML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and plan as JSON.")] = False,
) -> None:
    """Examine memory, swap, disk, GPU and limits of this machine."""
    settings = load_config(config) if config else None
    measured = settings.model.path if settings else path.absolute()
    gpu = gpu_ordinal(settings.worker.device) if settings else 0
    facts = load_machine(machine) if machine else probe(measured, gpu=gpu)
    findings = examine(facts, measured)
    result = make_plan(settings, ModelConfig.from_dir(settings.model.path), facts) if settings else None
    if as_json:
        planned = plan_json(result, facts) if result else {"machine": asdict(facts)}
        print(json.dumps({"findings": [asdict(finding) for finding in findings]} | planned))
    else:
        console = Console(soft_wrap=True, highlight=False)
        console.print(escape(facts.name))
        for finding in findings:
            console.print(_line(finding))
        if result:
            show(console, result, facts)
    if result and not result.fits:
        raise typer.Exit(ExitCode.CONFIG)


def _line(finding: Finding) -> str:
    colour = _COLOURS[finding.level]
    return f"  [{colour}]{finding.level.value:4}[/{colour}]  {finding.subject}: {escape(finding.text)}"
