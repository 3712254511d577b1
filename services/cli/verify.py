"""`icebox verify`: is this checkpoint whole, and if not, what must be downloaded again?"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli.progress import byte_progress
from shared.checkpoint.verify import VerifyReport
from shared.checkpoint.verify import verify as verify_checkpoint
from shared.errors import ExitCode


def verify(
    directory: Annotated[Path, typer.Argument(help="The checkpoint, as downloaded or packed.")],
    full: Annotated[bool, typer.Option(help="Read every byte, compare checksums, look for impossible values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check files, names, types, shapes and sizes of a checkpoint; with --full, its data too."""
    started = time.monotonic()
    with byte_progress(f"reading {directory}", quiet=as_json or not full) as progress:
        report = verify_checkpoint(directory, full, progress)
    seconds = time.monotonic() - started
    if as_json:
        extra = {"ok": not report.problems, "full": full, "download_again": report.download_again, "seconds": seconds}
        print(json.dumps(asdict(report) | extra))
    else:
        _print(directory, report, full, seconds)
    if report.problems:
        raise typer.Exit(ExitCode.FAILED)


def _print(directory: Path, report: VerifyReport, full: bool, seconds: float) -> None:
    for problem in report.problems:
        print(f"{problem.file}: {problem.text}")
    if report.download_again:
        print(f"Download again: {' '.join(report.download_again)}")
    if not report.problems:
        print(f"{directory}: {report.tensors:,} tensors in {report.files} files, {report.nbytes:,} bytes: all well")
    if full:
        compared = f"{report.checksums:,} checksums compared" if report.checksums else "no checksums there to compare"
        print(f"Read {report.nbytes / 1e9:.2f} GB in {seconds:.1f} s ({report.nbytes / seconds / 1e9:.2f} GB/s)")
        print(compared)
    elif not report.problems:
        print("Headers only; --full reads the data too")
