"""`python -m services.monitor --config FILE [--once] [--json]`: a live view, or one look."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from services.monitor.render import render
from shared.config import load_config
from shared.errors import ExitCode, IceboxError
from shared.observation.collector import WINDOW_S, Collector

REFRESH_S = 0.25
# One look lasts long enough for rates: several snapshots of every service.
LOOK_S = 1.0
LEAVE = Text("Ctrl-C leaves", style="dim")


def main() -> int:
    parser = argparse.ArgumentParser(prog="icebox monitor", description="Watch the running services.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--once", action="store_true", help="one look instead of a live view")
    parser.add_argument("--json", action="store_true", help="with --once: print the numbers as JSON")
    args = parser.parse_args()
    if args.json and not args.once:
        parser.error("--json needs --once")
    if not args.once and not sys.stdout.isatty():
        parser.error("a live view needs a terminal; use --once")
    try:
        collector = Collector(load_config(args.config))
    except IceboxError as error:
        print(f"icebox: {error}", file=sys.stderr)
        return error.exit_code
    try:
        if args.once:
            look(collector, as_json=args.json)
        else:
            watch(collector)
    except KeyboardInterrupt:
        return ExitCode.OK
    finally:
        collector.close()
    return ExitCode.OK


def look(collector: Collector, *, as_json: bool) -> None:
    collector.listen(LOOK_S)
    view = collector.view()
    if as_json:
        print(json.dumps(asdict(view)))
    else:
        Console(highlight=False).print(render(view))


def watch(collector: Collector) -> None:
    """Redraw until Ctrl-C, which only sets a flag: an exception could be lost in a destructor."""
    assert REFRESH_S < WINDOW_S
    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: stopped.set())
    with Live(
        Group(Text("listening ..."), LEAVE), console=Console(highlight=False), screen=True, auto_refresh=False
    ) as live:
        while not stopped.is_set():
            collector.listen(REFRESH_S)
            live.update(Group(render(collector.view()), LEAVE), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
