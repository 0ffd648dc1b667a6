"""The frame of a picture: title, numbers and legend on top, and below them axes as wide as the picture.

Needs matplotlib. Measures are inches, fixed from the top and the left, so that nothing is cut off
at any size; wide pictures have larger letters.
"""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mpitrain.commands.schedule.cells import BUBBLE, PAIR_EDGE, Look, draw_rows, kinds, label_width, tint
from mpitrain.inputs import rendered
from mpitrain.schedules.actions import PAIR
from mpitrain.schedules.play.simulate import Timeline

LEFT = 0.75
RIGHT = 1.0
HEAD = 1.22
GAP = 0.42
FOOT = 0.55
# height of a line of the head; where the legend is, below two of them
LINE = 0.19
LEGEND = 1.0
# wider than WIDE only if the numbers then fit
NARROWEST = 10.0
WIDE = 24.0
WIDEST = 42.0
ROOMY = 2.0  # times the room that a number needs at least
POINTS = 72
NAMES = {
    "F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights",
    "R": "recomputation",
}  # fmt: skip


class Frame:
    """A figure with its title, lines of numbers and a legend, then filled from top to bottom.

    heights: of its axes. titled: the first of them has a title.
    """

    def __init__(
        self, timeline: Timeline, look: Look, heights: list[float], title: str, lines: list[str],
        titled: bool = False,
    ):  # fmt: skip
        num_lines = len(lines)
        self.width = _width(timeline, look)
        self.scale = min(1.7, max(1.0, self.width / 14))
        self.left, self.right, self.head, self.gap, self.foot = (
            self.scale * inches for inches in (LEFT, RIGHT, HEAD, GAP, FOOT)
        )
        self.legend = (LEGEND + LINE * (num_lines - 2)) * self.scale
        self.head += (0.24 * titled + LINE * (num_lines - 2)) * self.scale
        self.height = self.head + sum(heights) + self.gap * (len(heights) - 1) + self.foot
        self.figure = Figure(figsize=(self.width, self.height), facecolor="white")
        self.filled = self.head
        self.small = 8 * self.scale
        self.look = look
        self.end = timeline.makespan or 1
        self._write_head(title, lines)
        self._add_legend(timeline)

    def axes(self, height: float) -> Axes:
        """Add the next axes; time runs from 0 to the end of the timeline."""
        bottom = self.height - self.filled - height
        room = (self.width - self.left - self.right) / self.width
        axes = self.figure.add_axes(
            (self.left / self.width, bottom / self.height, room, height / self.height)
        )
        self.filled += height + self.gap
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=self.small)
        axes.set_xlim(0, self.end)
        return axes

    def rows(self, timeline: Timeline, row: float, title: str = "") -> Axes:
        """Add a timeline whose ranks have `row` inches each."""
        num_ranks = len(timeline.programs)
        axes = self.axes(row * num_ranks)
        unit = (self.width - self.left - self.right) * POINTS / self.end
        draw_rows(axes, timeline, self.look, (unit, row * POINTS))
        axes.set_xlim(0, self.end)
        every = next(step for step in (1, 2, 4, 8, 16, num_ranks + 1) if step * row >= 0.15 * self.scale)
        axes.set_yticks(range(0, num_ranks, every), [f"rank {rank}" for rank in range(0, num_ranks, every)])
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        self.name(axes, title)
        return axes

    def in_milliseconds(self, axes: Axes, form: Callable[[float, int], str] | None = None) -> None:
        """Name the axis of times. form: writes a number of another unit."""
        axes.xaxis.set_major_locator(MaxNLocator(12))
        if form:
            axes.xaxis.set_major_formatter(FuncFormatter(form))
        axes.set_xlabel("milliseconds", fontsize=self.small)

    def name(self, axes: Axes, title: str) -> None:
        """Write a small title above axes."""
        axes.set_title(title, fontsize=self.small, loc="left", pad=5)

    def _write_head(self, title: str, lines: list[str]) -> None:
        bold = {"fontsize": 13 * self.scale, "fontweight": "bold"}
        for position, line in enumerate([title, *lines]):
            style = {"fontsize": 9 * self.scale} if position else bold
            inches = self.scale * (0.34 + LINE * position if position else 0.3)
            self.figure.text(self.left / self.width, 1 - inches / self.height, line, va="baseline", **style)

    def _add_legend(self, timeline: Timeline) -> None:
        number = self.look.num_tints
        shades = range(number) if number <= 4 else (0, number // 2, number - 1)
        entries = [
            (f"{kind} {NAMES[kind]}", [tint(kind, shade, number) for shade in shades])
            for kind in kinds(timeline)
        ]
        entries.append(("bubble", [BUBBLE]))
        if self.look.tints:
            greys = [str(0.25 + 0.5 * shade / max(1, number - 1)) for shade in shades]
            entries.append((self.look.tints, greys))
        handles = [tuple(Patch(color=colour) for colour in colours) for _, colours in entries]
        labels = [label for label, _ in entries]
        if any(PAIR in program for program in timeline.programs):
            handles.append((Patch(facecolor="white", edgecolor=PAIR_EDGE),))
            labels.append("run together")
        self.figure.legend(
            handles, labels, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, loc="center left",
            bbox_to_anchor=(self.left / self.width, 1 - self.legend / self.height), ncols=len(labels),
            fontsize=self.small, frameon=False, borderpad=0, borderaxespad=0, columnspacing=1.2,
            handlelength=1.6, handletextpad=0.5,
        )  # fmt: skip

    def render(self, kind: str) -> bytes:
        """Return the figure as an .svg or .png file."""
        return rendered(self.figure, kind)


def _width(timeline: Timeline, look: Look) -> float:
    """Return the width at which the shortest computation has room for its number, within limits."""
    needed = timeline.makespan * label_width(timeline, look) / POINTS
    margins = 1.7 * (LEFT + RIGHT)
    if needed + margins > WIDEST:
        return WIDE
    return max(NARROWEST, min(WIDE, ROOMY * needed + margins), needed + margins)


def row_height(num_ranks: int) -> float:
    """Return the height of a rank's row in inches."""
    return min(0.36, max(0.14, 7 / num_ranks))
