"""The one place that reads configuration: a TOML file and the few environment variables that matter.

The result is a tree of frozen dataclasses. Unknown keys, wrong types and values out of range are `ConfigError`s that
name file and key. Nothing changes it later; values resolved at start (a cache of "auto" bytes) live elsewhere.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import reprlib
import tempfile
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

AUTO_BYTES = -1
POLICIES = ("lfu", "lfu-aged", "lru")
DEVICES = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
LOG_LEVELS = ("debug", "info", "warning", "error")

# ipc:// addresses are Unix socket paths: 107 bytes and a terminating zero (unix(7)).
MAX_SOCKET_PATH = 107

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)} | {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}


@dataclass(frozen=True, slots=True)
class RunConfig:
    name: str
    dir: Path | None = None
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class ModelSection:
    path: Path
    max_context: int = 4096


@dataclass(frozen=True, slots=True)
class CacheConfig:
    bytes: int = AUTO_BYTES
    policy: str = "lfu-aged"
    save_heat: bool = True


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    threads: int = 4
    direct: bool = True
    verify: bool = False


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    hash_layers: bool = True
    look_ahead: bool = True


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    device: str = "cpu"
    threads: int = 0
    prefill_chunk: int = 2048
    min_segment: int = 512
    session_bytes: int = 256 << 20
    session_dir: Path | None = None
    session_disk_bytes: int = 16 << 30
    max_queue: int = 16


@dataclass(frozen=True, slots=True)
class FrontConfig:
    max_queue: int = 64
    default_max_tokens: int = 1024
    request_timeout_s: int = 3600
    http_host: str = "127.0.0.1"
    http_port: int | None = None
    api_key: str = ""
    model_name: str = ""
    max_body_bytes: int = 16 << 20
    trust_control_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a service may know. `source` is the file it came from."""

    source: Path
    run: RunConfig
    model: ModelSection
    cache: CacheConfig = field(default_factory=CacheConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    front: FrontConfig = field(default_factory=FrontConfig)

    @property
    def run_dir(self) -> Path:
        """Where this instance keeps its sockets, locks and heat."""
        if self.run.dir is not None:
            return self.run.dir
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        root = Path(base) / "icebox" if os.path.isabs(base) else Path(tempfile.gettempdir()) / f"icebox-{os.getuid()}"
        return root / self.run.name

    @property
    def http_address_file(self) -> Path:
        """Where a running front writes the URL that it serves."""
        return self.run_dir / "front.http"

    def endpoint(self, name: str) -> str:
        """The ipc address of a socket in the run directory, such as "expertd" or "worker.control"."""
        return f"ipc://{self.run_dir / name}"


def gpu_ordinal(device: str) -> int:
    """The GPU, as CUDA counts them for a process, that worker.device means: 0 if it names none."""
    return int(device.partition(":")[2] or 0)


def under_honcho() -> bool:
    """Whether honcho started this process; it names each of its processes in their environment."""
    return "HONCHO_PROCESS_NAME" in os.environ


def state_dir() -> Path:
    """Where a person's own traces stay across logins: icebox in $XDG_STATE_HOME, else in ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "icebox"


def default_config_path() -> Path:
    """The config that a command uses if none is named: $ICEBOX_CONFIG, else the demo's, as in the Procfile."""
    return Path(os.environ.get("ICEBOX_CONFIG", "configs/demo.toml"))


def load_config(path: Path | str) -> Config:
    """Read and check a TOML file.

    Raises:
        ConfigError: the file is missing or not TOML, or a key is unknown, missing, ill-typed or out of range.
    """
    path = Path(path)
    table = read_toml(path, "config")
    if "source" in table:
        raise ConfigError(f"{path}: unknown key 'source'")
    config: Config = _Reader(path.resolve()).section(Config, {"source": str(path.resolve())} | table, "")
    _check(config)
    return config


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file. Raises ConfigError if this `what` file cannot be read or is not TOML."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this {what} file ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for key, value in _leaves(table):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{path}: '{key}' has more than the 64 bits that a whole number may have")
    return table


def _leaves(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, with its key. Without recursion: dotted keys nest as deep as they like."""
    left: list[tuple[str, Any]] = list(table.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{key}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(key, inner) for inner in value]
        else:
            yield key, value


class _Reader:
    """Turns TOML tables into dataclasses, remembering where it is for the error message."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def section(self, cls: type, table: dict[str, Any], prefix: str) -> Any:
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in table:
            if key not in fields:
                known = ", ".join(sorted(k for k in fields if k != "source"))
                raise ConfigError(f"{self._path}: unknown key '{prefix}{key}' (known here: {known})")
        missing = [n for n, f in fields.items() if n not in table and _is_required(f)]
        if missing:
            name = missing[0]
            what = f"table [{name}]" if dataclasses.is_dataclass(hints[name]) else f"key '{prefix}{name}'"
            raise ConfigError(f"{self._path}: missing {what}")
        return cls(**{k: self._value(hints[k], v, prefix + k) for k, v in table.items()})

    def _value(self, kind: Any, value: Any, key: str) -> Any:
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise ConfigError(f"{self._path}: '{key}' must be a table, written [{key}]")
            return self.section(typing.cast(type, kind), value, f"{key}.")
        if isinstance(kind, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        if kind is Path and isinstance(value, str) and value:
            return self._absolute(value, key)
        if kind is int and key.endswith("bytes"):
            return self._bytes(value, key, may_be_auto=key == "cache.bytes")
        if type(value) is not kind:
            raise ConfigError(f"{self._path}: '{key}' must be {_NAMES[kind]}, not {reprlib.repr(value)}")
        return value

    def _absolute(self, value: str, key: str) -> Path:
        """Relative paths are relative to the file that names them."""
        try:
            return (self._path.parent / Path(value).expanduser()).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{self._path}: '{key}' is not a usable path: {value!r} ({error})") from error

    def _bytes(self, value: Any, key: str, *, may_be_auto: bool) -> int:
        """A size; 0 turns off what it bounds, so where a size may be planned ("auto") it cannot be 0."""
        if may_be_auto and value == "auto":
            return AUTO_BYTES
        number = value if type(value) is int else parse_bytes(value) if isinstance(value, str) else None
        if number is None or not int(may_be_auto) <= number < 2**63:
            what = 'a size such as "64 MiB"' + (' or "auto"' if may_be_auto else "")
            raise ConfigError(f"{self._path}: '{key}' must be {what}, not {reprlib.repr(value)}")
        return number


_NAMES = {int: "a whole number", str: "text in quotes", bool: "true or false", Path: "a path in quotes"}


def parse_bytes(text: str) -> int | None:
    """A size such as "64 MiB", "1.5 GB" or "4096" as a number of bytes; None if it is no size."""
    match = re.fullmatch(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        return None
    return int(Fraction(match[1]) * _UNITS[match[2]])


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_token(key: str) -> bool:
    """What can stand in an Authorization header."""
    return all("!" <= letter <= "~" for letter in key)


# Least and most of whole numbers. Where nothing else bounds them, the most is beyond all use.
_RANGES = {
    "model.max_context": (2, 10**8),
    "reader.threads": (1, 256),
    "worker.threads": (0, 1024),
    "worker.prefill_chunk": (1, 2**16 - 1),  # a GPU's grid has no more rows, and attention has a row a token
    "worker.min_segment": (1, 10**8),
    "worker.max_queue": (1, 10**6),
    "front.max_queue": (1, 10**6),
    "front.default_max_tokens": (1, 10**8),
    "front.request_timeout_s": (1, 10**8),
    "front.http_port": (0, 2**16 - 1),
    "front.max_body_bytes": (1, 2**40),
}


def _check(config: Config) -> None:
    def demand(ok: bool, key: str, what: str, value: object) -> None:
        if not ok:
            raise ConfigError(f"{config.source}: '{key}' must be {what}, not {value!r}")

    run, worker, front = config.run, config.worker, config.front
    is_name = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", run.name) is not None
    demand(is_name, "run.name", "1 to 40 letters, digits, . _ -, not starting with . or -", run.name)
    demand(run.log_level in LOG_LEVELS, "run.log_level", f"one of {', '.join(LOG_LEVELS)}", run.log_level)
    demand(config.cache.policy in POLICIES, "cache.policy", f"one of {', '.join(POLICIES)}", config.cache.policy)
    is_device = DEVICES.fullmatch(worker.device) is not None
    demand(is_device, "worker.device", "cpu, cuda (the first GPU) or cuda:N", worker.device)
    for key, (least, most) in _RANGES.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        demand(value is None or least <= value <= most, key, f"{least} to {most}", value)
    kept = worker.session_dir is None or (worker.session_bytes > 0 and worker.session_disk_bytes > 0)
    demand(kept, "worker.session_dir", "left out where session_bytes or session_disk_bytes is 0", worker.session_dir)
    if not _is_token(front.api_key):
        raise ConfigError(f"{config.source}: 'front.api_key' must be of printable ASCII letters without spaces")
    if front.http_port is not None and not front.api_key and not _is_loopback(front.http_host):
        text = f"front.http_host = {front.http_host!r} lets other machines in, so 'front.api_key' must be set"
        raise ConfigError(f"{config.source}: {text}")
    longest = str(config.run_dir / "expertd.control")
    if len(longest.encode()) > MAX_SOCKET_PATH:
        raise ConfigError(f"{config.source}: run directory {config.run_dir} is too long for a socket path; set run.dir")
