"""Draw a step of a run's trace.json as SVG: one row a rank, one box an instruction, gaps where it waits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "I": "#eeca3b",
    "W": "#54a24b",
    "GATHER": "#72b7b2",
    "RELEASE": "#bab0ac",
    "REDUCE": "#b279a2",
    "SUM": "#b279a2",
    "NORM": "#e45756",
    "UPDATE": "#9d755d",
    "SPREAD": "#ff9da6",
}
LEFT = 90
LENGTH = 800
HEIGHT = 30


def drawn(trace: Path, title: str) -> str:
    """Return the picture of the shortest traced step: the one that other programs disturbed least."""
    steps = _steps(json.loads(trace.read_text())["traceEvents"])
    events = min(steps.values(), key=_span)
    begin = min(event["ts"] for event in events)
    scale = LENGTH / _span(events)
    rows = sorted({(event["pid"], event["tid"]) for event in events})
    lines = [_label(12, 22, title, size=15, weight="bold"), *_legend(events)]
    for number, row in enumerate(rows):
        lines.append(_label(12, 89 + number * (HEIGHT + 8), f"{row[0]}, stage {row[1]}"))
        lines += [
            _box(event, begin, scale, 70 + number * (HEIGHT + 8)) for event in events if _row(event) == row
        ]
    bottom = 70 + len(rows) * (HEIGHT + 8)
    lines.append(
        _label(LEFT, bottom + 16, f"{_span(events) / 1000:.0f} ms, the shortest of {len(steps)} steps")
    )
    lines.append(_label(12, 58, "replica"))
    return _picture(LEFT + LENGTH + 16, bottom + 28, lines)


def _steps(events: Sequence[Mapping]) -> dict[int, list[Mapping]]:
    found: dict[int, list[Mapping]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(event["args"]["step"], []).append(event)
    return found


def _span(events: Sequence[Mapping]) -> float:
    return max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)


def _row(event: Mapping) -> tuple[int, int]:
    return event["pid"], event["tid"]


def _kind(name: str) -> str:
    """Return the instruction of an event without its numbers: F of F3@1, or RECV_F of a message."""
    return name.partition("@")[0].partition("/")[0].rstrip("0123456789")


def _legend(events: Sequence[Mapping]) -> list[str]:
    kinds = dict.fromkeys(_kind(event["name"]) for event in events)
    found = []
    x = LEFT
    for kind in kinds:
        found.append(f'<rect x="{x}" y="47" width="12" height="12" fill="{COLOURS.get(kind, "#d0d0d0")}"/>')
        found.append(_label(x + 16, 58, kind))
        x += 30 + 9 * len(kind)
    return found


def _box(event: Mapping, begin: float, scale: float, y: float) -> str:
    x = LEFT + (event["ts"] - begin) * scale
    width = max(0.6, event["dur"] * scale)
    colour = COLOURS.get(_kind(event["name"]), "#d0d0d0")
    tip = escape(f"{event['name']}: {event['dur'] / 1000:.2f} ms")
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{colour}" '
        f'stroke="#ffffff" stroke-width="0.3"><title>{tip}</title></rect>'
    )


def _label(x: float, y: float, text: str, *, size: int = 13, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


def _picture(width: float, height: float, lines: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" fill="#222">'
    )
    return "\n".join(
        [head, f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>', *lines, "</svg>", ""]
    )
