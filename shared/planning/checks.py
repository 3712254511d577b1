"""What a doctor looks at on a machine, and what each finding means. Pure: facts in, findings out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shared.planning.machine import Machine

SLOW_DISK = 1e9
LITTLE_MEMORY = 8 * 10**9
SMALL_MEMLOCK = 1 << 30


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `text` says what was found and, unless it is fine, what to do."""

    level: Level
    subject: str
    text: str


def examine(machine: Machine, measured: Path) -> tuple[Finding, ...]:
    """Everything that matters for streaming experts, most of it also for machines without a GPU.

    `measured` is where the disk's speed comes from.
    """
    return (_memory(machine), _swap(machine), _disk(machine, measured), _free_space(machine), *_gpu(machine))


def _memory(machine: Machine) -> Finding:
    text = (
        f"{machine.memory_available / 1e9:.1f} GB available of {machine.memory_total / 1e9:.1f} GB, {machine.cpus} CPUs"
    )
    if machine.memory_available < LITTLE_MEMORY:
        return Finding(Level.WARN, "memory", f"{text}: little; stop other programs")
    return Finding(Level.OK, "memory", text)


def _swap(machine: Machine) -> Finding:
    if machine.swap_total == 0:
        return Finding(Level.OK, "swap", "off")
    text = f"{machine.swap_used / 1e9:.1f} of {machine.swap_total / 1e9:.1f} GB used"
    return Finding(Level.WARN, "swap", f"{text}: a page that is swapped out makes a step take seconds; `swapoff -a`")


def _disk(machine: Machine, measured: Path) -> Finding:
    if machine.disk_speed == 0:
        advice = "name a config or --path that has one"
        return Finding(Level.WARN, "disk", f"speed not measured: no safetensors file to read in {measured}; {advice}")
    text = f"{machine.disk_speed / 1e9:.2f} GB/s{'' if machine.disk_direct else ' through the page cache'}"
    if not machine.disk_direct:
        return Finding(
            Level.WARN, "disk", f"{text}: this file system refuses O_DIRECT; use ext4 or xfs on the NVMe drive"
        )
    if machine.disk_speed < SLOW_DISK:
        return Finding(Level.WARN, "disk", f"{text}: slow; a miss costs {13369344 / machine.disk_speed * 1e3:.0f} ms")
    return Finding(Level.OK, "disk", text)


def _free_space(machine: Machine) -> Finding:
    return Finding(Level.OK, "free space", f"{machine.disk_free / 1e9:.1f} GB")


def _gpu(machine: Machine) -> tuple[Finding, ...]:
    gpu = machine.gpu
    if gpu is None:
        return (Finding(Level.OK, "GPU", 'none: worker.device = "cpu" is what runs here'),)
    kind = "shares the system's memory" if gpu.integrated else f"{gpu.memory_free / 1e9:.1f} GB free"
    found = [Finding(Level.OK, "GPU", f"{gpu.name}, {gpu.memory_total / 1e9:.1f} GB, {kind}")]
    if gpu.held_by:
        pids = ", ".join(map(str, gpu.held_by))
        found.append(Finding(Level.WARN, "GPU", f"in use by process {pids}: stop it, or its memory is missing here"))
    if machine.memlock is not None and machine.memlock < SMALL_MEMLOCK:
        advice = "raise it (`ulimit -l unlimited`, or memlock in /etc/security/limits.conf) for pinned staging buffers"
        found.append(Finding(Level.WARN, "memlock", f"limited to {machine.memlock / 1e6:.1f} MB: {advice}"))
    return tuple(found)
