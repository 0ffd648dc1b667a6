"""The picture that a run leaves: its loss, and what communication cost. Written without a library.

A run ends with it, and matplotlib takes a second and 30 MB.
"""

from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10

import numpy as np

from mpitrain.cluster.rundir import RunDir
from mpitrain.inputs import as_argument, replacing, shown
from mpitrain.report.curves import BY_COLUMN, COLOURS, points
from mpitrain.report.series import AxisCost, StepReader, StepSeries

WIDTH, HEIGHT = 760, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 430, 34, 234  # of the curve
MOST_METRICS = 1 << 28  # bytes: a second or two to read
BARS = 530, 740  # of communication
MOST_BARS = 9
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.g{stroke:#8884}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}}"
)


def write(rundir: RunDir) -> str:
    """Draw a run into its directory; return why not, or nothing: a run that is done doesn't fail for it."""
    try:
        if rundir.metrics.lstat().st_size > MOST_METRICS:
            ask = f"mpitrain plot {as_argument(rundir.path)} --out loss.svg"
            return f"{shown(rundir.picture)} isn't drawn of so many steps: {ask}"
        content = draw(StepReader(rundir.metrics).read())
        with replacing(rundir.picture) as file:
            file.write(content)
    except (OSError, ValueError) as error:
        return f"{shown(rundir.picture)} can't be drawn: {shown(getattr(error, 'strerror', None) or error)}"
    return ""


def draw(steps: StepSeries) -> bytes:
    """Return the picture as an .svg file."""
    content = "".join([*_losses(steps), *_communication(steps.comm, steps.num_sampled)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}"><style>{STYLE}</style>{content}</svg>\n'
    ).encode()


def _losses(steps: StepSeries) -> Iterator[str]:
    lines = [
        (name, colour, of_run[0])
        for name, colour in (("loss", COLOURS[0]), ("val_loss", COLOURS[1]))
        if (of_run := points(BY_COLUMN[name], [steps], "step"))
    ]
    if not lines:
        return
    low_x, high_x = _range(np.concatenate([line.x for *_, line in lines]))
    low_y, high_y = _range(np.concatenate([line.y for *_, line in lines]))
    across = (RIGHT - LEFT) / (high_x - low_x)
    up = (BOTTOM - TOP) / (high_y - low_y)
    for value in ticks(low_y, high_y):
        y = BOTTOM - (value - low_y) * up
        yield f'<path class="g" d="M{LEFT} {y:.1f}H{RIGHT}"/>{_text(LEFT - 6, y + 4, f"{value:g}", "end")}'
    for value in ticks(low_x, high_x):
        yield _text(LEFT + (value - low_x) * across, BOTTOM + 16, f"{value:,.10g}", "middle")
    yield _text((LEFT + RIGHT) / 2, BOTTOM + 32, "step", "middle")
    for place, (name, colour, line) in enumerate(lines):
        xs, ys = LEFT + (line.x - low_x) * across, BOTTOM - (line.y - low_y) * up
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys))
        yield f'<path fill="none" stroke="{colour}" stroke-width="1.6" d="M{path}"/>'
        title = BY_COLUMN[name].title.partition(",")[0]
        yield f'<path stroke="{colour}" stroke-width="3" d="M{LEFT + 150 * place} 16h18"/>'
        yield _text(LEFT + 150 * place + 24, 20, f"{title}, nats")


def _communication(comm: dict[str, AxisCost], num_steps: int) -> Iterator[str]:
    """Draw the milliseconds of a step that each axis blocked rank 0, and those that were hidden."""
    costs = sorted(comm.items(), key=lambda item: -_milliseconds(item[1], 1))[:MOST_BARS]
    longest = max((_milliseconds(cost, num_steps) for _, cost in costs), default=0.0)
    if not longest:
        return
    yield _text(BARS[0] - 76, 20, f"communication of rank 0, ms a step (last {num_steps})")
    row = min(26.0, (BOTTOM - TOP) / len(costs))
    for place, (name, cost) in enumerate(costs):
        y = TOP + place * row
        yield _text(BARS[0] - 8, y + row / 2 + 4, name[:10], "end")
        x = float(BARS[0])
        for seconds, colour in ((cost.blocked_s, COLOURS[1]), (cost.overlapped_s, COLOURS[5])):
            length = 1e3 * (seconds or 0.0) / num_steps / longest * (BARS[1] - BARS[0] - 40)
            yield _bar(x, y + 2, length, row - 6, colour)
            x += length
        yield _text(x + 4, y + row / 2 + 4, f"{_milliseconds(cost, num_steps):.3g}")
    for place, (word, colour) in enumerate((("blocked", COLOURS[1]), ("hidden", COLOURS[5]))):
        yield _bar(BARS[0] + 90 * place, BOTTOM + 20, 12, 12, colour)
        yield _text(BARS[0] + 90 * place + 18, BOTTOM + 31, word)


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>'


def _milliseconds(cost: AxisCost, num_steps: int) -> float:
    return 1e3 * ((cost.blocked_s or 0.0) + (cost.overlapped_s or 0.0)) / num_steps


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = float(min(values)), float(max(values))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers between two, at most some seven."""
    wide = (high - low) / most
    unit = 10.0 ** floor(log10(wide))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= wide)
    return [float(place * step) for place in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
