"""`demo/tools.json` is for `icebox chat --tools`: what the demo model was trained to call."""

import json
from pathlib import Path

from demo.tasks import TOOLS

FILE = Path(__file__).resolve().parents[2] / "demo" / "tools.json"


def test_the_file_has_the_tools_of_the_training() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == list(TOOLS)
