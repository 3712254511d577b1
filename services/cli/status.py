"""`icebox status`: one look at the services, for people and for scripts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from services.cli.options import SERVICES, ConfigOption, chosen_config
from shared.config import Config
from shared.errors import ExitCode, ServiceError
from shared.protocol.messages import Pong
from shared.runtime.state import ServiceState
from shared.transport.control import ping

PING_S = 1.0
ABSENT = "not running"


def status(
    config: ConfigOption = None, as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False
) -> None:
    """Say which services run and what they do. Exit status 0 only if all are ready."""
    settings = chosen_config(config)
    services: dict[str, dict[str, Any]] = {}
    for name in SERVICES:
        try:
            services[name] = _entry(ping(settings, name, PING_S))
        except ServiceError as error:
            services[name] = {"state": "unknown", "detail": error.detail}
    if (url := _http_url(settings)) is not None and "pid" in services["front"]:
        services["front"]["http"] = url
    ready = all(entry["state"] == ServiceState.READY for entry in services.values())
    if as_json:
        print(json.dumps({"ready": ready, "run_dir": str(settings.run_dir), "services": services}))
    else:
        for name, entry in services.items():
            print(_line(name, entry))
    if not ready:
        raise typer.Exit(ExitCode.FAILED)


def _entry(pong: Pong | None) -> dict[str, Any]:
    if pong is None:
        return {"state": ABSENT, "detail": ""}
    return {key: value for key, value in asdict(pong).items() if key != "service"}


def _http_url(settings: Config) -> str | None:
    """What the front has written down; it may have died since."""
    try:
        return settings.http_address_file.read_text(encoding="ascii").strip()
    except OSError:
        return None


def _line(name: str, entry: dict[str, Any]) -> str:
    process = f"pid {entry['pid']}, up {entry['uptime_s']:.0f} s" if "pid" in entry else ""
    return f"{name:8} {entry['state']:12} {process:26} {entry['detail'] or entry.get('http', '')}".rstrip()
