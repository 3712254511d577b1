"""A benchmark as a picture: the time of every step, cold and then warm, one line for each pool size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.cli.bench_figures import Floor, Run
from shared.errors import ConfigError


def check_plots() -> None:
    """Raises ConfigError if there is nothing to draw with: better before measuring than after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'icebox[plots]'") from None


def draw(path: Path, runs: Sequence[Run], floor: Floor | None) -> None:
    """Write the PNG file."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="ms", yscale="log", title="Time of a decode step")
    for run in runs:
        steps = [ms for phase in run.phases for ms in phase.steps_ms]
        axes.plot(range(1, len(steps) + 1), steps, linewidth=0.8, label=f"{run.cached:.0%} of the experts cached")
    phases = runs[0].phases
    for number in range(1, len(phases)):
        edge = sum(len(phase.steps_ms) for phase in phases[:number])
        axes.axvline(edge + 0.5, color="grey", linestyle=":", label=f"{phases[number].name} from here")
    if floor:
        axes.axhline(floor.ms, color="black", linestyle="--", label="floor")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
