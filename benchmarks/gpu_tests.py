"""All tests that need a GPU, as one table.

    python -m benchmarks.gpu_tests [--workers 8] [FILE ...]

Files that compare the GPU's free memory run one after the other with no one else on their GPU, beside the rest where
there is a second one. Exits 1 unless everything passes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import save

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "gpu"
ALONE = ("test_memory.py", "test_services.py", "test_endurance.py")
"""Those that compare free memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one file's tests; `seconds` is the sum of what each took."""

    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="processes, by pytest-xdist, of files that share a GPU")
    parser.add_argument("files", nargs="*", type=Path, default=sorted(TESTS.glob("test_*.py")))
    args = parser.parse_args()
    alone = [[path] for path in args.files if path.name in ALONE]
    together = [path for path in args.files if path.name not in ALONE]
    gpus = torch.cuda.device_count()
    if not gpus:
        raise SystemExit("no GPU here: these tests would all be skipped")
    began = time.monotonic()
    with ThreadPoolExecutor(2 if gpus > 1 else 1) as pool:
        runs = [pool.submit(_run_each, [together] if together else [], 0, args.workers)]
        runs.append(pool.submit(_run_each, alone, gpus > 1, 1))
        outcomes = {name: outcome for run in runs for name, outcome in run.result().items()}
    seconds = round(time.monotonic() - began)
    figures = {name: asdict(outcome) for name, outcome in sorted(outcomes.items())}
    save("gpu_tests", {"gpu": torch.cuda.get_device_name(), "seconds": seconds, "files": figures})
    _show(outcomes, seconds)
    raise SystemExit(any(outcome.failed or not outcome.passed for outcome in outcomes.values()))


def _run_each(groups: Sequence[Sequence[Path]], gpu: int, workers: int) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for files in groups:
        print(f"GPU {int(gpu)}: {', '.join(path.name for path in files)}", flush=True)
        outcomes |= _run(files, int(gpu), workers)
    return outcomes


def _run(files: Sequence[Path], gpu: int, workers: int) -> dict[str, Outcome]:
    """One call of pytest, which prints what it does."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Each process would otherwise have a thread on every CPU, and wait for them all at every small operation.
        threads = max(1, (os.cpu_count() or 1) // (workers + 1))
        command = ["env", f"CUDA_VISIBLE_DEVICES={gpu}", f"OMP_NUM_THREADS={threads}", sys.executable, "-m", "pytest"]
        command += ["-vv", f"--junitxml={report}"]
        command += ["-n", str(workers), "--dist=worksteal", "-p", "no:benchmark"] if workers > 1 else []
        subprocess.run([*command, *map(str, files)], cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    return {path.name: outcome_of([case for case in cases if _file_of(case) == path.stem]) for path in files}


def _file_of(case: ElementTree.Element) -> str:
    """`tests.gpu.test_ops`, perhaps with a class behind it."""
    return next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))


def outcome_of(cases: Sequence[ElementTree.Element]) -> Outcome:
    """Of test cases as JUnit's XML has them."""
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    names = tuple(case.get("name", "") for case in failed)
    return Outcome(len(cases) - len(failed) - skipped, skipped, names, round(seconds, 1))


def _show(outcomes: dict[str, Outcome], seconds: int) -> None:
    table = Table(title=f"Tests on {torch.cuda.get_device_name()}, {seconds} s")
    for number, heading in enumerate(("file", "passed", "skipped", "failed", "seconds")):
        table.add_column(heading, justify="right" if number else "left")
    for name, each in sorted(outcomes.items()):
        failed = ", ".join(each.failed) or "-"
        table.add_row(name, str(each.passed), str(each.skipped), failed, f"{each.seconds:.0f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
