"""`icebox plan`: what a deployment needs, what its cache gets, how fast it may be, and whether it fits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.checkpoint.config import ModelConfig
from shared.config import gpu_ordinal, load_config
from shared.errors import ExitCode
from shared.planning.machine import Machine, load_machine, probe
from shared.planning.plan import Plan, make_plan


def plan(
    config: Annotated[Path, typer.Argument(help="The deployment's TOML file.")],
    machine: Annotated[Path | None, typer.Option(help="Plan for a machine described in this TOML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Work out memory, cache and speed of a deployment before anything is loaded."""
    settings = load_config(config)
    model = ModelConfig.from_dir(settings.model.path)
    facts = load_machine(machine) if machine else probe(settings.model.path, gpu=gpu_ordinal(settings.worker.device))
    result = make_plan(settings, model, facts)
    if as_json:
        print(json.dumps(plan_json(result, facts)))
    else:
        show(Console(soft_wrap=True, highlight=False), result, facts)
    if not result.fits:
        raise typer.Exit(ExitCode.CONFIG)


def plan_json(result: Plan, facts: Machine) -> dict[str, Any]:
    """The plan and the machine it was made for, for programs."""
    derived = {"fits": result.fits, "cached": result.cached, "backbone_bytes": result.backbone_bytes}
    return {"machine": asdict(facts), "plan": asdict(result) | derived}


def show(console: Console, result: Plan, facts: Machine) -> None:
    """The plan as a person reads it: budget, cache, expectation, verdict."""
    console.print(_budget(result, facts))
    console.print(f"Dense weights and state of the backbone: {gb(result.backbone_bytes)}")
    console.print(
        f"Cache: {gb(result.cache_bytes)} = {result.slots:,} slots of {result.slot_bytes:,} bytes, "
        f"{result.cached:.0%} of {result.experts:,} experts"
    )
    console.print(f"Expected hits: {result.hits.low:.1%} to {result.hits.high:.1%} of expert uses, once warm")
    for line in _speed(result):
        console.print(line)
    for problem in result.problems:
        console.print(f"[red]Does not fit:[/red] {escape(problem)}")
    if result.fits:
        console.print(f"[green]Fits[/green], with {gb(result.room - result.cache_bytes)} to spare above the reserve")


def _budget(result: Plan, facts: Machine) -> Table:
    table = Table(title=escape(f"{facts.name}: {result.memory} memory"), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("available", gb(result.available))
    for part in result.parts:
        table.add_row(f"  {part.name}", f"- {gb(part.nbytes)}")
    table.add_row("  reserve", f"- {gb(result.reserve)}")
    table.add_row("room for the cache", gb(result.room))
    return table


def _speed(result: Plan) -> list[str]:
    cost, hits, speed = result.cost, result.hits, result.speed
    if speed is None:
        return ["Speed: unknown, because this disk's or this memory's bandwidth is"]
    missed = cost.uses * cost.record_bytes
    low, high = two_digits(speed.low), two_digits(speed.high)
    return [
        f"Speed that these bandwidths allow: {low} to {high} tokens/s. One token reads",
        f"  {gb(cost.dense_bytes)} dense + {cost.uses} x {gb(cost.record_bytes)} experts = {gb(cost.memory_bytes)} "
        f"at {gb(cost.memory_bandwidth)}/s: {1000 * cost.memory_bytes / cost.memory_bandwidth:.1f} ms",
        f"  and misses {gb(missed * (1 - hits.low))} to {gb(missed * (1 - hits.high))} at {gb(cost.disk_bandwidth)}/s: "
        f"{1000 * missed * (1 - hits.low) / cost.disk_bandwidth:.1f} to "
        f"{1000 * missed * (1 - hits.high) / cost.disk_bandwidth:.1f} ms",
    ]


def gb(nbytes: float) -> str:
    """Decimal, as disks and memory are sold: "9.77 GB", "13.37 MB"."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def two_digits(value: float) -> str:
    """As much as an estimate is good for: "0.53", "11", "310"."""
    return f"{float(f'{value:.2g}'):,g}"
