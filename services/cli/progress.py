"""Progress bars in bytes with speed and time left, on stderr, for whatever reads or moves checkpoints.

Draws nothing when stderr is not a terminal or when the caller wants JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from shared.protocol.messages import Pong


@contextmanager
def byte_progress(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (bytes done, bytes in all)."""
    with _bars(quiet) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def loading_bars() -> Iterator[Callable[[Sequence[Pong], Sequence[Pong]], None]]:
    """Yields a function of (all answers, those that changed): a bar for each service that reads, a line for changes."""
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def show(pongs: Sequence[Pong], changed: Sequence[Pong]) -> None:
            for pong in changed:
                if bars.disable or not pong.total_bytes:
                    bars.console.print(describe(pong), highlight=False, markup=False, soft_wrap=True)
            for pong in pongs:
                if pong.total_bytes:
                    if pong.service not in tasks:
                        tasks[pong.service] = bars.add_task("")
                    task = tasks[pong.service]
                    bars.update(task, description=describe(pong), completed=pong.done_bytes, total=pong.total_bytes)
                elif pong.service in tasks:
                    bars.remove_task(tasks.pop(pong.service))

        yield show


def describe(pong: Pong) -> str:
    """One line, such as "worker: starting, weights: layer 3 of 43"."""
    return f"{pong.service}: {pong.state}" + (f", {pong.detail}" if pong.detail else "")


def _bars(quiet: bool = False) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)
