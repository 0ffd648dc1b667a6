"""A timeline drawn to scale: one row per rank, one cell per computation.

Only pictures import this, and with it matplotlib.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from mpitrain.schedules.actions import COMPUTE, PAIR, Action
from mpitrain.schedules.play.draw import microbatch_label
from mpitrain.schedules.play.simulate import Timeline

SMALL = 8.0  # points, of letters
GREY = "#808080"
# Okabe and Ito's, which colour-blind readers tell apart; further stages, copies, segments are tints
COLOURS = {"F": "#0072B2", "B": "#D55E00", "I": "#E69F00", "W": "#009E73", "R": "#56B4E9"}
BUBBLE, PAIR_EDGE = "#ECECEC", "#111111"
LIGHTEST = 0.6  # share of white in the last tint
CELL_HEIGHT = 0.84  # of a row
DIGIT = 0.64  # width of a digit, of its font's size
FONT_SIZES = 4.6, 9.0  # points: smaller is not legible, larger not needed
MOST_SHAPES = 20_000  # above it an .svg holds them as pixels


@dataclass(frozen=True)
class Look:
    """How cells differ.

    chunks: the stages of each rank; tints tell them apart, or else the segments of a sequence.
    copies: of the model, which the stages of a rank are.
    """

    chunks: tuple[tuple[int, ...], ...]
    segments: int = 1
    copies: int = 1

    @property
    def num_stages(self) -> int:
        """Of a rank, at most."""
        return max(map(len, self.chunks))

    @property
    def num_tints(self) -> int:
        return self.num_stages if self.num_stages > 1 else self.segments

    @property
    def tints(self) -> str:
        """What darker and lighter mean."""
        if self.copies > 1:
            return "first and second copy"
        if self.num_stages > 1:
            two = "first and second stage"
            return f"the rank's {two if self.num_stages == 2 else f'{self.num_stages} stages in turn'}"
        return "segments in turn" if self.segments > 1 else ""

    def colour(self, rank: int, action: Action) -> tuple[float, float, float]:
        of_stage = self.num_stages > 1
        shade = self.chunks[rank].index(action.stage) if of_stage else action.index % self.segments
        return tint(action.kind, shade, self.num_tints)

    def label(self, action: Action) -> str:
        return microbatch_label(action.index, self.segments)


def finish(axes: Axes) -> None:
    """Give axes of curves small letters, a pale grid behind, and no frame above and to the right."""
    axes.tick_params(which="both", labelsize=SMALL, length=0)
    axes.grid(color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def tint(kind: str, shade: int, num_tints: int) -> tuple[float, float, float]:
    """Return the colour of a kind, lighter for each further stage."""
    white = LIGHTEST * shade / max(1, num_tints - 1)
    return tuple(channel + (1 - channel) * white for channel in to_rgb(COLOURS[kind]))


def draw_rows(axes: Axes, timeline: Timeline, look: Look, points: tuple[float, float]) -> None:
    """Draw all ranks' rows.

    `points`: the width of one unit of time and the height of a row, for labels to fit.
    """
    cells = [(rank, *cell) for rank in range(len(timeline.programs)) for cell in timeline.walks(rank)]
    _background(axes, len(timeline.programs), timeline.makespan)
    shortest = min((end - start for *_, start, end in cells if end > start), default=1)
    thin = min(0.6, 0.12 * points[0] * shortest)
    shapes = PolyCollection(
        [_box(rank, start, end) for rank, _, start, end in cells],
        facecolors=[look.colour(rank, action) for rank, action, *_ in cells],
        edgecolors="white", linewidths=thin, zorder=2, rasterized=len(cells) > MOST_SHAPES,
    )  # fmt: skip
    axes.add_collection(shapes)
    _join_pairs(axes, timeline, points)
    _labels(axes, cells, look, points)
    axes.set_ylim(len(timeline.programs) - 0.5, -0.5)
    axes.set_xlim(0, timeline.makespan or 1)


def _background(axes: Axes, num_ranks: int, end: float) -> None:
    """Fill rows with the bubble's colour: where no cell lies on it, a rank waits."""
    rows = [_box(rank, 0, end) for rank in range(num_ranks)]
    axes.add_collection(PolyCollection(rows, facecolors=BUBBLE, linewidths=0, zorder=1))


def _box(rank: int, start: float, end: float, height: float = CELL_HEIGHT) -> list[tuple[float, float]]:
    top = rank - height / 2
    bottom = rank + height / 2
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _join_pairs(axes: Axes, timeline: Timeline, points: tuple[float, float]) -> None:
    frames = []
    for rank, program in enumerate(timeline.programs):
        starts = timeline.starts[rank]
        ends = timeline.ends[rank]
        for position, action in enumerate(program):
            if action == PAIR and position + 2 < len(program):
                end = max(ends[position + 1 : position + 3])
                frames.append(_box(rank, starts[position + 1], end, CELL_HEIGHT * 0.97))
    if not frames:
        return
    room = points[0] * min(corners[1][0] - corners[0][0] for corners in frames)
    width = max(0.4, min(1.3, 0.05 * points[1], 0.07 * room))
    axes.add_collection(
        PolyCollection(frames, facecolors="none", edgecolors=PAIR_EDGE, linewidths=width, zorder=3)
    )


def _labels(
    axes: Axes, cells: list[tuple[int, Action, float, float]], look: Look, points: tuple[float, float]
) -> None:
    """Write microbatch numbers in one size, into the cells with room for the longest number."""
    if not cells:
        return
    smallest, largest = FONT_SIZES
    length = max(len(look.label(action)) for _, action, *_ in cells)
    tightest = (points[0] * _short(end - start for *_, start, end in cells) - 1) / (DIGIT * length)
    size = min(largest, 0.62 * points[1] * CELL_HEIGHT, max(tightest, smallest))
    if size < smallest:
        return
    for rank, action, start, end in cells:
        if points[0] * (end - start) - 1 >= DIGIT * size * length * 0.999:
            ink = "white" if _luminance(look.colour(rank, action)) < 0.42 else "#1a1a1a"
            axes.text(
                (start + end) / 2, rank, look.label(action), fontsize=size, color=ink,
                ha="center", va="center_baseline", zorder=4,
            )  # fmt: skip


def label_width(timeline: Timeline, look: Look) -> float:
    """Return the points per unit of time at which a short computation just holds the longest number."""
    cells = [cell for rank in range(len(timeline.programs)) for cell in timeline.walks(rank)]
    length = max((len(look.label(action)) for action, *_ in cells), default=1)
    return (1.02 * DIGIT * FONT_SIZES[0] * length + 1) / _short(end - start for _, start, end in cells)


def _short(lengths: Iterable[float]) -> float:
    """Return a short computation's time: of a hundred the third; what was measured has outliers."""
    lengths = sorted(length for length in lengths if length > 0)
    return lengths[len(lengths) // 40] if lengths else 1.0


def _luminance(rgb: tuple[float, float, float]) -> float:
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def kinds(timeline: Timeline) -> list[str]:
    """Return which kinds of computations there are."""
    found = {action.kind for program in timeline.programs for action in program}
    return [kind for kind in COMPUTE if kind in found]
