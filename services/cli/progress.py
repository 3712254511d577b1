"""Progress bars on stderr: bytes with speed and time left for whatever reads or moves checkpoints, else a count.

Draws nothing when stderr is not a terminal or when the caller wants JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from shared.protocol.messages import Pong


@contextmanager
def byte_progress(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (bytes done, bytes in all)."""
    with _byte_bars(quiet) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def counter(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call when one more of `total` is done; "37 of 200" is shown meanwhile."""
    with _bars(MofNCompleteColumn(separator=" of ")) as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)


@contextmanager
def loading_bars() -> Iterator[Callable[[Sequence[Pong], Sequence[Pong]], None]]:
    """Yields a function of (all answers, those that changed): a bar for each service that reads, a line for changes."""
    with _byte_bars() as bars:
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


def _byte_bars(quiet: bool = False) -> Progress:
    return _bars(DownloadColumn(binary_units=True), TransferSpeedColumn(), quiet=quiet)


def _bars(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    shown = (TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(
        *shown,
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe stays there
    )
