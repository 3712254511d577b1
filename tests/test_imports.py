"""Who may import whom, and who reads the environment: the rules that keep the processes apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("kernels", "services", "shared")
SERVICES = ("cli", "expertd", "front", "monitor", "worker")

THIRD_PARTY = {
    "kernels": {"torch", "tilelang", "tvm"},
    "shared": {"cuda", "msgpack", "numpy", "zmq"},
    "services.cli": {"markdown_it", "matplotlib", "prompt_toolkit", "rich", "typer"},
    "services.expertd": {"numpy"},
    "services.front": {"jsonschema_rs", "prometheus_client", "starlette", "tokenizers", "uvicorn", "uvloop"},
    "services.monitor": {"rich"},
    "services.worker": {"numpy", "safetensors", "torch"},
}
INTERNAL = {"kernels": {"kernels"}, "shared": {"shared"}} | {
    f"services.{name}": {"shared", f"services.{name}"} for name in SERVICES
}
INTERNAL["services.worker"].add("kernels")

HEAVY = ("torch", "tilelang", "tvm", "cuda")


def modules() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The part of the tree whose rule applies: a service, or a top-level package."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "services" else parts[0]


def imports_of(path: Path) -> Iterator[str]:
    """Every module that this one imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            if node.module == "services":
                yield from (f"services.{alias.name}" for alias in node.names)


def forbidden(module: str, imported: str) -> bool:
    unit, target, top = unit_of(module), unit_of(imported), imported.split(".")[0]
    if top in sys.stdlib_module_names or imported == "services":
        return False
    if top in OURS:
        return target not in INTERNAL.get(unit, set())
    return top not in THIRD_PARTY.get(unit, set())


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_what_its_package_may(path: Path) -> None:
    module = name_of(path)
    assert [name for name in imports_of(path) if forbidden(module, name)] == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("shared.protocol.codec", "torch"),
        ("shared.stats", "services.front"),
        ("shared.stats", "kernels"),
        ("services.front.service", "services.worker.engine"),
        ("services.front.service", "torch"),
        ("services.cli.__main__", "services.monitor.render"),
        ("services.cli.__main__", "kernels.reference"),
        ("services.expertd.pool", "kernels"),
        ("kernels.reference.rotary", "shared.errors"),
        ("kernels", "numpy"),
    ],
)
def test_the_rule_itself(module: str, imported: str) -> None:
    assert forbidden(module, imported)
    assert not forbidden("services.worker.engine", "kernels.reference.rotary")
    assert not forbidden("services.worker.engine", "shared.errors")


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in modules()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_only_the_configuration_reads_the_environment() -> None:
    def reads_it(path: Path) -> bool:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return bool(names & {"environ", "getenv", "putenv", "environb"})

    assert [name_of(path) for path in modules() if reads_it(path)] == ["shared.config"]


@pytest.mark.parametrize("unit", ["shared", "services.front", "services.cli", "services.monitor", "services.expertd"])
def test_no_heavy_library_is_loaded(unit: str) -> None:
    names = [name_of(path) for path in modules() if unit_of(name_of(path)) == unit]
    assert names
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_benchmarks_take_from_the_tests_does_not_need_the_tests_folder_on_the_path() -> None:
    """`python -m benchmarks.X` knows helpers as tests.helpers; only pytest knows them as helpers as well."""
    left = sorted((ROOT / "benchmarks").glob("*.py"))
    helpers: set[Path] = set()
    while left:
        path = left.pop()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            assert node.level or node.module.split(".")[0] != "helpers", f"{path}: line {node.lineno}"
            base = path.parent if node.level else ROOT
            found = base.joinpath(*node.module.split(".")).with_suffix(".py")
            if found.parent.name == "helpers" and found not in helpers:
                helpers.add(found)
                left.append(found)
    assert {path.stem for path in helpers} >= {"services", "gpu"}
