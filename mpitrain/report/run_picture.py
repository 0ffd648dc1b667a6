"""The pictures that a run leaves: run.svg, losses and communication; loads.svg, loads of its experts.

Written without a library: a run ends with them, and matplotlib takes a second and 30 MB.
"""

from collections.abc import Iterator, Mapping
from html import escape
from math import floor, log10

import numpy as np

from mpitrain.cluster.rundir import RunDir
from mpitrain.inputs import as_argument, replacing, shown
from mpitrain.report.curves import BY_COLUMN, COLOURS, axis_range, lines_of, load_cells
from mpitrain.report.series import AxisCost, LoadsLine, StepReader, StepSeries

WIDTH, HEIGHT = 760, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 430, 34, 234  # of the curve
MOST_METRICS = 1 << 28  # bytes: a second or two to read
BARS = 530, 740  # of communication
MOST_BARS = 9
LOADS = 500, 740  # of the loads of experts
SHADES = 20  # of a load, up to twice the mean
MOST_NAMED_BLOCKS = 12
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.g{stroke:#8884}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}}"
)


def write(rundir: RunDir) -> str:
    """Draw a run into its directory; return what is to be said: a run that is done doesn't fail for it."""
    to = rundir.picture
    try:
        if rundir.metrics.lstat().st_size > MOST_METRICS:
            return f"{shown(to)} isn't drawn of so many steps: mpitrain report {as_argument(rundir.path)}"
        steps = StepReader(rundir.metrics).read()
        titles = {"loss": "training loss, nats", "val_loss": "validation loss, nats"}
        costs = _communication(steps.comm, steps.num_sampled)
        with replacing(to) as file:
            file.write(_picture(*_curves(steps, titles), *costs))
        if steps.loads is None:
            return ""
        to = rundir.loads
        titles = {"load_cv": BY_COLUMN["load_cv"].title}
        with replacing(to) as file:
            file.write(_picture(*_curves(steps, titles), *_loads(steps.loads)))
        return f"loads of experts: {shown(to)}"
    except (OSError, ValueError) as error:
        return f"{shown(to)} can't be drawn: {shown(getattr(error, 'strerror', None) or error)}"


def _picture(*content: str) -> bytes:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}"><style>{STYLE}</style>{"".join(content)}</svg>\n'
    ).encode()


def _curves(steps: StepSeries, titles: Mapping[str, str]) -> Iterator[str]:
    drawn = lines_of([BY_COLUMN[column] for column in titles], [steps], "step")
    lines = {titles[curve.column]: line for curve, (line,) in drawn.items()}
    if not lines:
        return
    low_x, high_x = axis_range(*(line.x for line in lines.values()))
    low_y, high_y = axis_range(*(line.y for line in lines.values()))
    across = (RIGHT - LEFT) / (high_x - low_x)
    up = (BOTTOM - TOP) / (high_y - low_y)
    for value in ticks(low_y, high_y):
        y = BOTTOM - (value - low_y) * up
        yield f'<path class="g" d="M{LEFT} {y:.1f}H{RIGHT}"/>{_text(LEFT - 6, y + 4, f"{value:g}", "end")}'
    for value in ticks(low_x, high_x):
        yield _text(LEFT + (value - low_x) * across, BOTTOM + 16, f"{value:,.10g}", "middle")
    yield _text((LEFT + RIGHT) / 2, BOTTOM + 32, "step", "middle")
    for place, (title, line) in enumerate(lines.items()):
        xs, ys = LEFT + (line.x - low_x) * across, BOTTOM - (line.y - low_y) * up
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys))
        colour = COLOURS[place]
        yield f'<path fill="none" stroke="{colour}" stroke-width="1.6" d="M{path}"/>'
        yield f'<path stroke="{colour}" stroke-width="3" d="M{LEFT + 150 * place} 16h18"/>'
        yield _text(LEFT + 150 * place + 24, 20, title)


def _loads(loads: LoadsLine) -> Iterator[str]:
    """Draw the load of each expert, a row a block, the darker the higher."""
    cells = load_cells(loads)
    if not len(cells["x"]):
        return
    num_blocks, num_experts = (int(cells[axis].max()) + 1 for axis in ("y", "x"))
    wide, high = (LOADS[1] - LOADS[0]) / num_experts, (BOTTOM - TOP) / num_blocks
    yield _text(LOADS[0], 20, f"loads in step {loads.step:,}, over the mean")
    shades = np.ceil(cells["alpha"] * SHADES) / SHADES
    for shade in np.unique(shades):
        chosen = shades == shade
        places = zip(LOADS[0] + cells["x"][chosen] * wide, TOP + cells["y"][chosen] * high)
        boxes = "".join(f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:.1f}h-{wide:.1f}" for x, y in places)
        yield f'<path fill="{COLOURS[0]}" fill-opacity="{shade:.2f}" d="{boxes}"/>'
    names = [name for name, shares in loads.expert_loads.items() if shares][:num_blocks]
    for place in range(0, num_blocks, -(-num_blocks // MOST_NAMED_BLOCKS)):
        yield _text(LOADS[0] - 6, TOP + (place + 0.5) * high + 4, names[place][:10], "end")
    for expert in ticks(0, max(1, num_experts - 1)):
        if expert == int(expert) < num_experts:
            yield _text(LOADS[0] + (expert + 0.5) * wide, BOTTOM + 16, f"{expert:.0f}", "middle")
    yield _text(LOADS[0], BOTTOM + 32, "expert")
    for place, (word, opacity) in enumerate((("0.5", 0.25), ("1", 0.5), ("2 or more", 1))):
        x = LOADS[0] + 60 + 50 * place
        yield _bar(x, BOTTOM + 21, 12, 12, COLOURS[0], opacity) + _text(x + 16, BOTTOM + 32, word)


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
            length = 1e3 * seconds / num_steps / longest * (BARS[1] - BARS[0] - 40)
            yield _bar(x, y + 2, length, row - 6, colour)
            x += length
        yield _text(x + 4, y + row / 2 + 4, f"{_milliseconds(cost, num_steps):.3g}")
    for place, (word, colour) in enumerate((("blocked", COLOURS[1]), ("hidden", COLOURS[5]))):
        yield _bar(BARS[0] + 90 * place, BOTTOM + 20, 12, 12, colour)
        yield _text(BARS[0] + 90 * place + 18, BOTTOM + 31, word)


def _bar(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}" fill-opacity="{opacity:g}"/>'


def _milliseconds(cost: AxisCost, num_steps: int) -> float:
    return 1e3 * (cost.blocked_s + cost.overlapped_s) / num_steps


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two, at most some seven."""
    wide = (high - low) / 6
    unit = 10.0 ** floor(log10(wide))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= wide)
    return [float(place * step) for place in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
