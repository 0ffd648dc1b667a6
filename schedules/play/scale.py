"""Draw a timeline to scale in text, a row of characters per rank. Other than `grid`, it shows real times:

F0-F1-....B0----B1----        a computation, from its start to its end; dots are waiting
"""

from mpitrain.schedules.play.draw import microbatch_label
from mpitrain.schedules.play.timeline import Timeline


def to_scale(timeline: Timeline, columns: int, end: float, segments: int = 1) -> list[str]:
    """Return each rank's row, `columns` characters for 0 to `end`; its second stage in lower case."""
    return [
        _row(timeline, rank, columns / end if end else 0, columns, segments)
        for rank in range(len(timeline.programs))
    ]


def _row(timeline: Timeline, rank: int, scale: float, columns: int, segments: int) -> str:
    row = ["."] * columns
    cells = timeline.walks(rank)
    stages = sorted({action.stage for action, *_ in cells})
    for action, start, stop in cells:
        left = round(start * scale)
        right = min(round(stop * scale), columns)
        kind = action.kind.lower() if stages.index(action.stage) % 2 else action.kind
        label = f"{kind}{microbatch_label(action.index, segments)}"
        room = right - left
        row[left:right] = (label if len(label) <= room else kind).ljust(room, "-")[:room]
    return "".join(row)
