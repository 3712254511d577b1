"""`icebox synth`: write a random checkpoint in the vendor's layout."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from services.cli.progress import byte_progress
from shared.checkpoint.synth import SynthOptions, synthesise


def synth(
    out: Annotated[Path, typer.Argument(help="Directory to write; missing or empty.")],
    width: Annotated[str, typer.Option(help="full (the real shapes), small (about 20 MB) or tiny.")] = "small",
    layers: Annotated[int | None, typer.Option(help="Backbone layers; default: the width's own.")] = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts per layer; default: the width's own.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
    skew: Annotated[float, typer.Option(help="Exponent of the Zipf law of expert use; 0 is even.")] = 0.8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a random checkpoint of any size, for demos, tests and benchmarks."""
    started = time.monotonic()
    with byte_progress(f"writing {out}", quiet=as_json) as progress:
        report = synthesise(out, SynthOptions(width, layers, experts, seed, skew), progress)
    seconds = time.monotonic() - started
    if as_json:
        print(
            json.dumps(
                {
                    "path": str(report.path),
                    "shards": report.shards,
                    "tensors": report.tensors,
                    "bytes": report.nbytes,
                    "seconds": round(seconds, 3),
                }
            )
        )
        return
    rate = report.nbytes / seconds / 1e9
    print(
        f"{report.path}: {report.tensors:,} tensors in {report.shards} shards, {report.nbytes / 1e9:.3f} GB, "
        f"{seconds:.1f} s ({rate:.2f} GB/s)"
    )
