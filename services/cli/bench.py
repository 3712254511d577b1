"""`icebox bench decode`: how fast a deployment decodes with a cold and a warm cache, and how far from the floor it is.

Measures from outside, as a client: tokens by their arrival, all else by the services' counters.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from services.cli.bench_figures import Floor, Run, floor_of, fractions_table, phase, phases_table
from services.cli.bench_plot import check_plots, draw
from services.cli.bench_services import running
from services.cli.options import check_output, finite
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout, least_slots
from shared.config import Config, gpu_ordinal, load_config
from shared.errors import ConfigError
from shared.planning.machine import Machine, probe
from shared.planning.plan import make_plan, resolve_cache_bytes
from shared.protocol.messages import Generate

bench = typer.Typer(no_args_is_help=True)
PHASES = ("cold", "warm")


@bench.callback()
def _bench() -> None:
    """Measure a deployment with services of its own."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the worker: random prompts from `seed`; temperature 0 is greedy."""

    tokens: int
    prompt_tokens: int
    seed: int
    temperature: float


@bench.command()
def decode(
    config: Annotated[Path, typer.Argument(help="The deployment's TOML file.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each phase: cold, then warm.")] = 200,
    cache: Annotated[
        list[float] | None,
        typer.Option(
            help="Pool size as a part of the backbone's experts, at most 1; may be repeated.",
            show_default="cache.bytes",
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt by which prefill is measured.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts and of sampling.")] = 0,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="0 is greedy; random weights then repeat.")
    ] = 0.0,
    ceiling: Annotated[
        float | None,
        typer.Option(min=0.001, callback=finite, help="Measured memory bandwidth in TB/s.", show_default="the GPU's"),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until the services must be ready.")] = 900.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw step times to this PNG file.")] = None,
) -> None:
    """Decode with a cold and with a warm cache, in services of its own, and report."""
    settings = load_config(config)
    model = ModelConfig.from_dir(settings.model.path)
    load = Load(tokens, prompt, seed, temperature)
    _check(settings, load, [path for path in (json_out, plot) if path])
    if plot:
        check_plots()
    sizes = [pool_bytes(part, model) for part in cache] if cache else [resolve_cache_bytes(settings, model)]
    machine = probe(settings.model.path, speeds=False, gpu=gpu_ordinal(settings.worker.device))
    floor = _floor(settings, model, machine, ceiling)
    console = Console(soft_wrap=True, highlight=False)
    runs = []
    for size in sizes:
        runs.append(_run(settings, size, model, load, timeout))
        console.print(phases_table(runs[-1], floor))
        console.print(f"prefill of {runs[-1].prefill_tokens} tokens: {runs[-1].prefill_tokens_per_s:.1f} tokens/s\n")
    if len(runs) > 1:
        console.print(fractions_table(runs, floor))
    console.print(_floor_line(floor))
    if json_out:
        json_out.write_text(json.dumps(report(settings, machine, load, floor, runs), indent=2) + "\n", encoding="utf-8")
    if plot:
        draw(plot, runs, floor)


def pool_bytes(part: float, model: ModelConfig) -> int:
    """The pool for this part of the backbone's experts, in bytes. Raises ConfigError naming the parts that can be."""
    experts = backbone_experts(model)
    least = math.ceil(1000 * least_slots(model) / experts) / 1000
    if not least <= part <= 1:
        raise ConfigError(f"--cache {part:g}: must be {least:g} to 1 for this model")
    return math.ceil(part * experts) * RecordLayout.of(model).slot_bytes


def backbone_experts(model: ModelConfig) -> int:
    """How many there are for decoding to use; those of the extra blocks are not among them."""
    return model.num_hidden_layers * model.n_routed_experts


def _check(config: Config, load: Load, outputs: Sequence[Path]) -> None:
    """Raises ConfigError for what would fail only after minutes of measuring."""
    for path in outputs:
        check_output(path)
    longest = max(load.tokens + 1, load.prompt_tokens + 1)
    if longest > config.model.max_context:
        raise ConfigError(
            f"{config.source}: model.max_context = {config.model.max_context} is too little for {longest} tokens; "
            f"raise it, or lower --tokens and --prompt"
        )


def _floor(config: Config, model: ModelConfig, machine: Machine, ceiling_tb_s: float | None) -> Floor | None:
    cost = make_plan(config, model, machine).cost
    if ceiling_tb_s:
        return floor_of(cost, ceiling_tb_s * 1e12, "--ceiling")
    return floor_of(cost, cost.memory_bandwidth, "the GPU's clock and bus width")


def _floor_line(floor: Floor | None) -> str:
    if floor is None:
        return "No floor: this memory's bandwidth is unknown; --ceiling tells it in TB/s."
    return (
        f"Floor: {floor.dense_bytes / 1e9:.3f} GB dense + {floor.expert_bytes / 1e9:.3f} GB of experts "
        f"at {floor.ceiling / 1e12:.2f} TB/s ({floor.ceiling_from}) = {floor.ms:.3f} ms a step"
    )


def _run(config: Config, cache_bytes: int, model: ModelConfig, load: Load, timeout_s: float) -> Run:
    draws = random.Random(load.seed)

    def ask(prompt_tokens: int, max_tokens: int) -> Generate:
        ids = tuple(draws.randrange(model.vocab_size) for _ in range(prompt_tokens))
        return Generate(ids, max_tokens, temperature=load.temperature, seed=draws.getrandbits(31))

    started = time.monotonic()
    with running(config, cache_bytes, timeout_s) as services:
        start_s = time.monotonic() - started
        phases = []
        counters = services.counters()
        slots, experts = int(counters["slots_total"]), backbone_experts(model)
        for name in PHASES:
            ids, times = services.generate(ask(1, load.tokens))
            before, counters = counters, services.counters()
            phases.append(phase(name, ids, times, before, counters))
        services.generate(ask(load.prompt_tokens, 1))
        seconds = services.counters()["prefill_seconds"] - counters["prefill_seconds"]
        return Run(slots, experts, start_s, tuple(phases), load.prompt_tokens, load.prompt_tokens / seconds)


def report(config: Config, machine: Machine, load: Load, floor: Floor | None, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that was measured, for programs."""
    return {
        "cpus": machine.cpus,
        "gpu": machine.gpu.name if machine.gpu else None,
        "checkpoint": config.model.path.name,
        "device": config.worker.device,
        "load": asdict(load),
        "floor": asdict(floor) | {"ms": floor.ms} if floor else None,
        "runs": [asdict(run) | {"cached": run.cached, "phases": _phases(run, floor)} for run in runs],
    }


def _phases(run: Run, floor: Floor | None) -> list[dict[str, Any]]:
    return [asdict(phase) | {"over_floor": floor.ratio(phase) if floor else None} for phase in run.phases]
