"""Draw horizontal stacked bars as SVG: what is held, sent or waited for, by kind."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")
CHARACTER = 7.5  # the width of a letter
LENGTH = 470
HEIGHT = 22
GAP = 10


def stacked(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return the picture of {bar: {part: value}}; all bars have one scale."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    most = max(sum(row.values()) for row in rows.values()) or 1
    left = 20 + round(CHARACTER * max(map(len, rows)))
    top = 54 + 20 * ((len(parts) + 3) // 4)
    lines = [_text(12, 24, title, size=15, weight="bold"), *_legend(parts)]
    for number, (name, row) in enumerate(rows.items()):
        y = top + number * (HEIGHT + GAP)
        lines.append(_text(left - 8, y + 16, name, anchor="end"))
        lines += _bar(left, y, row, parts, LENGTH / most)
        lines.append(
            _text(left + LENGTH * sum(row.values()) / most + 6, y + 16, f"{sum(row.values()):.4g} {unit}")
        )
    return _picture(max(left, 190) + LENGTH + 110, top + len(rows) * (HEIGHT + GAP) + 8, lines)


def _bar(left: float, y: float, row: Mapping[str, float], parts: Sequence[str], scale: float) -> list[str]:
    found = []
    x = left
    for part, value in row.items():
        width = value * scale
        colour = COLOURS[parts.index(part) % len(COLOURS)]
        label = escape(f"{part}: {value:.4g}")
        found.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{colour}">'
            f"<title>{label}</title></rect>"
        )
        x += width
    return found


def _legend(parts: Sequence[str]) -> list[str]:
    found = []
    for number, part in enumerate(parts):
        x = 12 + 190 * (number % 4)
        y = 48 + 20 * (number // 4)
        found.append(
            f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        found.append(_text(x + 18, y, part))
    return found


def _text(
    x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def _picture(width: float, height: float, lines: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'font-family="sans-serif" fill="#222">'
    )
    ground = f'<rect width="{width:.0f}" height="{height:.0f}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, ground, *lines, "</svg>", ""])
