"""Runs one subcommand of `icebox` in this process, as the console script would."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import pytest

from services.cli.__main__ import main


def icebox(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    with patch.object(sys, "argv", ["icebox", *map(str, arguments)]), pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def icebox_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """(exit code, parsed stdout) of a subcommand with --json; nothing else may be printed."""
    code, out, err = icebox(capsys, *arguments, "--json")
    assert err == ""
    content: dict[str, Any] = json.loads(out)
    return code, content
