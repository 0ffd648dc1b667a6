"""The picture of a schedule: its timeline to scale, and the memory it holds, beneath. Needs matplotlib.

Measures are inches, fixed from the top and the left, so that nothing is cut off at any size.
"""

import io

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mpitrain.report.cells import BUBBLE, PAIR_EDGE, Look, draw_rows, kinds, tint
from mpitrain.report.played import Played
from mpitrain.report.schedule_text import number

LEFT, RIGHT, HEAD, GAP, FOOT, MEMORY = 0.85, 0.95, 1.22, 0.28, 0.55, 1.7
WIDTHS = 8.0, 24.0
CELL = 0.185  # width of the shortest computation, if the whole then fits
POINTS = 72
SINGLE_CURVES = 8  # ranks with a memory curve each; of more ranks an envelope is drawn
NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


def draw(played: Played, kind: str) -> bytes:
    """Return the picture as an .svg or .png file."""
    timeline = played.timeline
    width = figure_width(timeline)
    row = row_height(played.num_ranks)
    height = HEAD + row * played.num_ranks + GAP + MEMORY + FOOT
    figure = Figure(figsize=(width, height), facecolor="white")
    rows = add_axes(figure, HEAD, row * played.num_ranks)
    unit = (width - LEFT - RIGHT) * POINTS / (timeline.makespan or 1)
    draw_rows(rows, timeline, Look(played.table.chunks, played.table.segments), (unit, row * POINTS))
    name_ranks(rows, played.num_ranks, row)
    curves = add_axes(figure, HEAD + row * played.num_ranks + GAP, MEMORY)
    _draw_memory(curves, played)
    rows.set_xticklabels([])
    write_head(figure, _title(played), _lines(played))
    add_legend(figure, kinds(timeline), Look(played.table.chunks, played.table.segments).num_tints, _lighter(played), _has_pairs(played))
    return render(figure, kind)


def _title(played: Played) -> str:
    return f"{played.table.name}:  {played.num_ranks} ranks, {played.num_microbatches} microbatches"


def _lines(played: Played) -> list[str]:
    forward, grad, weight, message = map(number, played.times)
    return [
        f"makespan {number(played.timeline.makespan)}, bubble {played.timeline.bubble:.1%};  span {number(played.span)}, "
        f"bubble rate {played.bubble_rate:.1%};  peak {number(max(played.peak_stashes))} stashes",
        f"times of a rank's share of layers: F {forward}, I {grad}, W {weight}, B {number(played.times.input + played.times.weight)}; "
        f"message {message}",
    ]


def _lighter(played: Played) -> str:
    """Say what a lighter tint means."""
    table = played.table
    if table.copies > 1:
        return "lighter: second copy"
    stages = max(map(len, table.chunks))
    if stages > 1:
        return "lighter: the rank's second stage" if stages == 2 else f"lighter: the rank's stages 2 to {stages}"
    return "lighter: later segments" if table.segments > 1 else ""


def _has_pairs(played: Played) -> bool:
    return any(action.kind == "PAIR" for actions in played.table.ranks for action in actions)


# ---------------------------------------------------------------- the parts of a figure


def figure_width(timeline) -> float:
    """Return the width in inches at which the shortest computation can hold its number, within limits."""
    lengths = [end - start for rank in range(len(timeline.programs)) for _, start, end in timeline.computations(rank) if end > start]
    cells = timeline.makespan / min(lengths, default=1)
    return min(max(WIDTHS[0], LEFT + RIGHT + cells * CELL), WIDTHS[1])


def row_height(num_ranks: int) -> float:
    """Return the height of a rank's row in inches."""
    return min(0.36, max(0.13, 6.5 / num_ranks))


def add_axes(figure: Figure, top: float, height: float) -> Axes:
    """Add axes `top` inches from the top, over the whole width."""
    width, total = figure.get_size_inches()
    axes = figure.add_axes((LEFT / width, 1 - (top + height) / total, (width - LEFT - RIGHT) / width, height / total))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=8)
    return axes


def name_ranks(axes: Axes, num_ranks: int, row: float) -> None:
    """Label the rows, as many as there is room for."""
    every = max(1, round(0.17 / row + 0.3))
    axes.set_yticks(range(0, num_ranks, every), [f"rank {rank}" for rank in range(0, num_ranks, every)])
    axes.spines["bottom"].set_visible(False)


def write_head(figure: Figure, title: str, lines: list[str]) -> None:
    """Write title and numbers into the upper left corner."""
    width, height = figure.get_size_inches()
    figure.text(LEFT / width, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", va="baseline")
    for position, line in enumerate(lines):
        figure.text(LEFT / width, 1 - (0.53 + 0.19 * position) / height, line, fontsize=9, va="baseline", color="#333333")


def add_legend(figure: Figure, shown: list[str], num_tints: int, lighter: str, pairs: bool) -> None:
    """Explain the colours, in one line under the numbers."""
    shades = range(num_tints) if num_tints <= 4 else (0, num_tints // 2, num_tints - 1)
    handles = [tuple(Patch(color=tint(kind, shade, num_tints)) for shade in shades) for kind in shown]
    labels = [f"{kind} {NAMES[kind]}" for kind in shown]
    handles.append((Patch(color=BUBBLE),))
    labels.append("bubble")
    if pairs:
        handles.append((Patch(facecolor="white", edgecolor=PAIR_EDGE),))
        labels.append("run together")
    if lighter:
        handles.append((Patch(visible=False),))
        labels.append(lighter)
    width, height = figure.get_size_inches()
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="center left",
        bbox_to_anchor=(LEFT / width, 1 - 1.02 / height),
        ncols=len(labels),
        fontsize=8,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.2,
        handlelength=1.6,
        handletextpad=0.5,
    )


# ---------------------------------------------------------------- memory


def _draw_memory(axes: Axes, played: Played) -> None:
    """Draw the stashes that ranks hold: a curve for each rank, or the worst one in the envelope of all."""
    curves = [played.memory(rank) for rank in range(played.num_ranks)]
    if played.num_ranks <= SINGLE_CURVES:
        _each_rank(axes, curves, played.timeline.makespan)
    else:
        _envelope(axes, curves, played.peak_stashes, played.timeline.makespan)
    if played.memory_limit is not None:
        axes.axhline(played.memory_limit, color="#B00020", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(" limit", (1, played.memory_limit), xycoords=("axes fraction", "data"), fontsize=8, color="#B00020", va="center")
    axes.set_xlim(0, played.timeline.makespan or 1)
    axes.set_ylim(0, 1.1 * max(1, *played.peak_stashes, played.memory_limit or 0))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel("stashes in flight", fontsize=8)
    axes.set_xlabel("time", fontsize=8)


def _each_rank(axes: Axes, curves: list[list[tuple[float, float]]], end: float) -> None:
    from matplotlib import colormaps

    for rank, curve in enumerate(curves):
        colour = colormaps["viridis"](0.92 * rank / max(1, len(curves) - 1))
        times, held = zip(*curve, (end, curve[-1][1]))
        axes.step(times, held, where="post", color=colour, linewidth=1.6 - 0.08 * rank, label=f"rank {rank}", zorder=3)
    axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), fontsize=7.5, frameon=False, handlelength=1.2, labelspacing=0.25)


def _envelope(axes: Axes, curves: list[list[tuple[float, float]]], peaks: list[float], end: float) -> None:
    """Fill between the least and the most that any rank holds, and draw the worst rank and the median."""
    import numpy as np

    times = np.unique([0.0, end, *(time for curve in curves for time, _ in curve)])
    held = np.array([_sample(curve, times) for curve in curves])
    worst = peaks.index(max(peaks))
    axes.fill_between(times, held.min(axis=0), held.max(axis=0), step="post", color="#C9D7E6", linewidth=0, label="all ranks")
    axes.step(times, np.median(held, axis=0), where="post", color="#5B7FA6", linewidth=1, label="median")
    axes.step(times, held[worst], where="post", color="#1a1a1a", linewidth=1.3, label=f"rank {worst}")
    axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), fontsize=7.5, frameon=False, handlelength=1.2, labelspacing=0.35)


def _sample(curve: list[tuple[float, float]], times):
    import numpy as np

    at, held = zip(*curve)
    return np.array(held)[np.searchsorted(at, times, side="right") - 1]


# ---------------------------------------------------------------- files


def render(figure: Figure, kind: str) -> bytes:
    """Return the figure as a file. The same figure gives the same bytes."""
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "mpitrain"}):
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()
