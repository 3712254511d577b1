"""The kernels under NVIDIA's compute-sanitizer: every access in bounds, no race in shared memory.

    python -m benchmarks.sanitizer [--tool memcheck] [--workers 14]

Runs the small tests of the kernels once plainly, which compiles, and once under each tool, after the tool has shown
that it finds a planted fault. Test files run side by side, for the tools are slow. One line a tool and file; exits 1
unless all are clean, whatever the tests say of results.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report

# Of what the driver is asked by others we check nothing.
TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
NAMES = ("ops", "gemm", "experts", "attention", "indexer", "decode_attention", "decode_kernels")
TESTS = [f"tests/gpu/test_{name}.py" for name in NAMES]
# Thousands of launches each; another test draws a few tokens.
CHOICE = "not test_sampling"
FOUND = 86
"""Exit code of a tool that found something, whatever the program's own."""
LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a tool said of a program. `summary` is its own last line, `tests` pytest's, `details` the beginning of its
    report and the end of the program's."""

    verdict: str
    summary: str
    tests: str
    seconds: float
    details: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=list(TOOLS), action="append", help="may be repeated (default: all)")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile (pytest-xdist), files at once")
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("no compute-sanitizer on the PATH: it comes with NVIDIA's CUDA toolkit")
    side_by_side = ["-n", str(arguments.workers), "-p", "no:benchmark"] if arguments.workers else []
    plain = subprocess.run([*_pytest(*TESTS), *side_by_side], capture_output=True, text=True)
    print(f"without a tool: {_last_line(plain.stdout)}", flush=True)
    if " passed" not in plain.stdout:
        raise SystemExit(f"no test passes here\n{plain.stdout[-2000:]}{plain.stderr[-2000:]}")
    names, tools = _kernel_names(), arguments.tool or list(TOOLS)
    with ThreadPoolExecutor(max(1, arguments.workers)) as pool:
        verdicts: dict[str, dict[str, Verdict]] = {tool: {} for tool in tools if _finds_faults(tool)}
        runs = {(tool, test): pool.submit(_under, tool, _pytest(test), names) for tool in verdicts for test in TESTS}
        for (tool, test), run in runs.items():
            verdicts[tool][Path(test).stem] = run.result()
            _show(tool, test, run.result())
    figures = {tool: {test: _figures(verdict) for test, verdict in own.items()} for tool, own in verdicts.items()}
    report.save("sanitizer", {"kernels": len(names), "tools": figures})
    is_clean = all(verdict.verdict == "clean" for own in verdicts.values() for verdict in own.values())
    raise SystemExit(not is_clean or len(verdicts) < len(tools))


def _show(tool: str, test: str, verdict: Verdict) -> None:
    said = f"{verdict.verdict}, {verdict.seconds:.0f} s; {verdict.summary}; {verdict.tests}"
    print(f"{tool} {Path(test).stem}: {said}", flush=True)
    if verdict.verdict != "clean":
        print(verdict.details, file=sys.stderr)


def _figures(verdict: Verdict) -> dict[str, object]:
    return {key: value for key, value in asdict(verdict).items() if key != "details"}


def _pytest(*tests: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "small", "-k", CHOICE, f"--timeout={LIMIT_S}", *tests]


def _kernel_names() -> list[str]:
    """Of all our kernels, as the GPU knows them: what else runs in the tests is PyTorch's."""
    code = (
        "import importlib, pkgutil, kernels\n"
        "for module in pkgutil.walk_packages(kernels.__path__, 'kernels.'): importlib.import_module(module.name)\n"
        "from kernels.tile import KERNELS\n"
        "print('names', *(kernel.entry for kernel in KERNELS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sorted(set(done.stdout.splitlines()[-1].split()[1:]))


def _under(tool: str, command: list[str], kernels: list[str]) -> Verdict:
    """Run a command under a tool that looks at these kernels."""
    filters = [part for name in kernels for part in ("--kernel-name", f"kne={name}")]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
        options += ["--log-file", str(log), *TOOLS[tool], *filters]
        # Without PyTorch's cache every tensor is an allocation of its own, with bounds that can be seen.
        program = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", *options, *command]
        try:
            done = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return Verdict("unfinished", f"more than {LIMIT_S} s", "", LIMIT_S, "")
        said = log.read_text(encoding="utf-8") if log.exists() else done.stdout + done.stderr
    lines = [line.lstrip("= ") for line in said.splitlines()]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), lines[-1] if lines else "nothing said")
    is_clean = done.returncode != FOUND and re.search(r"SUMMARY: 0 (errors|hazards)", summary)
    details = "\n".join([*lines[:60], done.stdout[-2000:], done.stderr[-1000:]])
    seconds = round(time.monotonic() - began, 1)
    return Verdict("clean" if is_clean else "faults", summary, _last_line(done.stdout), seconds, details)


def _last_line(output: str) -> str:
    return output.strip().rpartition("\n")[2]


def _finds_faults(tool: str) -> bool:
    """A tool that cannot run at all finds nothing, and says no number."""
    planted = _under(tool, [sys.executable, "-m", "benchmarks.sanitizer_faults", tool], ["planted_kernel"])
    if planted.verdict == "faults" and re.search(r"SUMMARY: [1-9]", planted.summary):
        return True
    print(f"{tool}: useless here, a planted fault was not found: {planted.summary}\n{planted.details}", file=sys.stderr)
    return False


if __name__ == "__main__":
    main()
