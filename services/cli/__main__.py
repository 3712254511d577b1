"""The `icebox` command."""

from __future__ import annotations

import sys

from services.cli.outcome import run_to_end


def main() -> None:
    """Entry point of the console script; leaves by SystemExit."""
    run_to_end(_run)


def _run() -> None:
    # Takes a moment to import: here, where Ctrl-C is an ordinary end.
    from services.cli.app import run

    run(sys.argv[1] if len(sys.argv) > 1 else "")


if __name__ == "__main__":
    main()
