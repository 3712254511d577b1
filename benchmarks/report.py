"""What every benchmark's result carries: figures, the command, the machine, the versions and the commit."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "tilelang", "numpy", "pyzmq", "msgpack", "safetensors", "transformers")


def machine() -> dict[str, Any]:
    """Processor, cores and memory of this machine, and how busy it is besides."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "os": platform.platform(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write benchmarks/results/<name>.json; returns its path."""
    result = {
        "benchmark": name,
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": _versions(),
        "figures": figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def show(title: str, rows: dict[str, str]) -> None:
    """A two-column table on the terminal."""
    table = Table(title=title, show_header=False)
    for key, value in rows.items():
        table.add_row(key, value)
    Console().print(table)


def _versions() -> dict[str, str]:
    """Of those packages that are there: not every benchmark needs them all."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _commit() -> str:
    """With a plus where files have changed since; "unknown" for a copy without its repository."""
    commit = _git("rev-parse", "--short", "HEAD")
    return commit + ("+" if _git("status", "--porcelain", "-uno") else "") if commit else "unknown"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
