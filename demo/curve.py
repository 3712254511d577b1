"""Draws the training logs as one SVG: loss by kind of row, and held-out answers that were right to the letter.

python -m demo.curve
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from demo.corpus import HERE

LOGS = (HERE / "training" / "part1.jsonl", HERE / "training" / "part2.jsonl")
OUT = HERE / "training" / "curve.svg"
WIDTH, HEIGHT, LEFT, TOP = 720, 240, 50, 24
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8d5a97", "#b8860b", "#555555")
Line = Sequence[tuple[float, float]]


def read() -> list[dict[str, object]]:
    """Log lines of all parts, with one running count of seconds as `t`."""
    lines: list[dict[str, object]] = []
    start = 0.0
    for path in LOGS:
        part = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        lines += [line | {"t": start + line["s"]} for line in part]
        start += part[-1]["s"]
    return lines


def series(lines: Iterable[dict[str, object]], group: str, key: str) -> Line:
    return [(line["t"], line[group][key]) for line in lines if key in line.get(group, {})]  # type: ignore[index, operator, call-overload]


def chart(title: str, lines: dict[str, Line], top: float, offset: float) -> str:
    end = max(t for line in lines.values() for t, _ in line)
    parts = [f'<text x="{LEFT}" y="{offset + 14}" font-size="13">{title}</text>']
    base = offset + TOP + HEIGHT
    for tick in range(5):
        y = base - HEIGHT * tick / 4
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{y + 4}" font-size="11">{top * tick / 4:.2f}</text>')
    for number, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{LEFT + WIDTH * t / end:.1f},{base - HEIGHT * min(v, top) / top:.1f}" for t, v in line)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x = LEFT + 110 * number
        parts.append(f'<text x="{x}" y="{base + 16}" font-size="11" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{LEFT + WIDTH - 60}" y="{base + 30}" font-size="11">{end:.0f} s</text>')
    return "\n".join(parts)


def main() -> None:
    lines = read()
    losses = {f"rows of {n} tokens": series(lines, "loss", str(n)) for n in (512, 3328)}
    checks = {
        name: series(lines, "check", name) for name in ("arithmetic", "thinking", "near", "middle", "far", "tools")
    }
    body = chart("Loss of the backbone", losses, 2.0, 0) + chart(
        "Held-out answers right to the letter", checks, 1.0, 310
    )
    size = f'width="{LEFT + WIDTH + 20}" height="620"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n{body}\n</svg>\n'
    OUT.write_text(svg, encoding="utf-8")
    print(OUT)


if __name__ == "__main__":
    main()
