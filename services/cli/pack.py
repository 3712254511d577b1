"""`icebox pack`: rewrite a checkpoint so that each expert is one aligned read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from services.cli.progress import byte_progress
from shared.checkpoint.pack import pack as pack_checkpoint


def pack(
    directory: Annotated[Path, typer.Argument(help="The checkpoint as downloaded.")],
    out: Annotated[Path, typer.Argument(help="Where the pack goes: missing, empty, or a pack begun earlier.")],
    delete_source: Annotated[
        bool, typer.Option("--delete-source", help="Delete each shard once its content is verified in the pack.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Pack a checkpoint. Stop it at any time: the same command goes on."""
    started = time.monotonic()
    with byte_progress(f"packing {directory}", quiet=as_json) as progress:
        report = pack_checkpoint(directory, out, delete_source, progress)
    seconds = time.monotonic() - started
    if as_json:
        row = {"path": str(report.path), "files": report.files, "bytes": report.nbytes, "freed_bytes": report.freed}
        print(json.dumps(row | {"seconds": round(seconds, 3)}))
        return
    freed = f", {report.freed / 1e9:.2f} GB of the source deleted" if delete_source else ""
    print(f"{report.path}: {report.nbytes / 1e9:.3f} GB in {report.files} files, {seconds:.1f} s{freed}")
