"""Draw all rows of a back-test: predicted over published seconds, one colour for each machine.

Only pictures import this, and with it matplotlib.
"""

import io
from collections.abc import Mapping

from matplotlib.figure import Figure as Drawing

from mpitrain.commands.output_file import write

SIZE = (8, 5)  # inches


def draw(points: Mapping[str, tuple[list[float], list[float]]], out: str) -> None:
    """Write the picture as .svg or .png. Raises ConfigError if it can't be written.

    points: published and predicted seconds by machine.
    """
    drawing = Drawing(figsize=SIZE)
    axes = drawing.subplots()
    every = [number for x, y in points.values() for number in (*x, *y)] or [1.0]
    ends = [min(every), max(every)]
    axes.plot(ends, ends, color="0.5", linewidth=1)
    for name, (x, y) in sorted(points.items()):
        axes.scatter(x, y, s=14, label=name)
    axes.set(xscale="log", yscale="log", xlabel="published, s a step", ylabel="predicted, s a step")
    axes.legend(fontsize=8)
    content = io.BytesIO()
    drawing.savefig(content, format=out.rpartition(".")[2])
    write("--out", out, content.getvalue())
