"""The chat format's vocabulary: control tokens, and the long sentences that belong to one checkpoint.

The sentences (how to call tools, how to answer in a schema, how hard to think) live in the checkpoint's own
`encoding/encoding_dsv4.py`. They are read as literals; the file is parsed and never run. Knows no message.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}

# What a tokenizer must have as single tokens before any turn can be written.
ESSENTIAL_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)

ENCODING_FILE = Path("encoding") / "encoding_dsv4.py"
_TOOL_FIELDS = frozenset({"tool_schemas", "dsml_token", "thinking_start_token", "thinking_end_token"})


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What differs between checkpoints.

    `efforts` maps each accepted reasoning effort to the text it puts in front of everything (None: the default).
    A checkpoint without an encoding file has no templates: turns and thinking work, tools and schemas do not.
    """

    name: str = "plain"
    tools_template: str | None = None
    response_template: str | None = None
    efforts: Mapping[str | None, str] = field(default_factory=lambda: {None: ""})


def load_format(checkpoint: Path) -> ChatFormat:
    """The format of a checkpoint directory; plain turns if it carries no encoding file.

    Raises:
        CheckpointError: there is an encoding file, but its constants cannot be read.
    """
    path = checkpoint / ENCODING_FILE
    try:
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ChatFormat()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot read the chat format ({error})") from error
    try:
        return format_from_constants(read_constants(source))
    except (SyntaxError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read the chat format: {error}") from error


def read_constants(source: str) -> dict[str, Any]:
    """Module-level literals of a Python source by name; anything that is not a literal is left out.

    Raises:
        SyntaxError, ValueError: the text is not Python.
    """
    constants: dict[str, Any] = {}
    for node in ast.parse(source).body:
        for name, value in _assignments(node):
            try:
                constants[name] = ast.literal_eval(_Inlined(constants).visit(value))
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
    return constants


def _assignments(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [(node.target.id, node.value)]
    if isinstance(node, ast.Assign):
        return [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
    return []


class _Inlined(ast.NodeTransformer):
    """Replaces names of strings that are known already, so that one constant may use another."""

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self._constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._constants.get(node.id)
        return ast.Constant(value) if isinstance(value, str) else node


def format_from_constants(constants: Mapping[str, Any]) -> ChatFormat:
    """The format that an encoder's constants describe.

    The three-level table of efforts names the later encoder; the single "max" sentence names the preview, where
    "high" is accepted and adds nothing.

    Raises:
        ValueError: a constant is missing or not what it should be; the message names it.
    """
    templates = {
        "tools_template": _template(constants, "TOOLS_TEMPLATE", _TOOL_FIELDS),
        "response_template": _template(constants, "response_format_template", frozenset({"schema"})),
    }
    if "REASONING_EFFORT_PROMPTS" in constants:
        return ChatFormat("0731", **templates, efforts=_effort_table(constants))
    if isinstance(constants.get("REASONING_EFFORT_MAX"), str):
        return ChatFormat(
            "preview", **templates, efforts={None: "", "high": "", "max": constants["REASONING_EFFORT_MAX"]}
        )
    raise ValueError("neither REASONING_EFFORT_PROMPTS nor REASONING_EFFORT_MAX is there as a literal")


def _effort_table(constants: Mapping[str, Any]) -> dict[str | None, str]:
    table = constants["REASONING_EFFORT_PROMPTS"]
    if not isinstance(table, dict) or not all(isinstance(text, str) for item in table.items() for text in item):
        raise ValueError("REASONING_EFFORT_PROMPTS is not a table of texts")
    default = constants.get("DEFAULT_REASONING_EFFORT", "low")
    if default not in table:
        raise ValueError(f"REASONING_EFFORT_PROMPTS has no entry for the default {default!r}")
    return {None: table[default], **table}


def _template(constants: Mapping[str, Any], name: str, fields: frozenset[str]) -> str:
    """A `str.format` template whose only fields are plain names out of `fields`."""
    template = constants.get(name)
    if not isinstance(template, str):
        raise ValueError(f"{name} is not there as a literal text")
    for _, used, spec, conversion in string.Formatter().parse(template):
        if used is not None and (used not in fields or spec or conversion):
            raise ValueError(f"{name} uses the field {used!r}; known are {', '.join(sorted(fields))}")
    return template
