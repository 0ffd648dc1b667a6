"""The picture of a run's loads of experts, drawn in a child of its last rank.

matplotlib takes 20 to 50 MB, which a rank that has what `mpitrain memory` predicts may not have left.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from mpitrain.cluster.rundir import lines_of
from mpitrain.comm.base.interpreter import python
from mpitrain.comm.base.launchers import without_launcher
from mpitrain.errors import CheckpointError
from mpitrain.inputs import decoded, load_matplotlib, replacing, shown

DRAWN_S = 120.0  # most that a picture may take: a run that is done doesn't wait for it any longer
BlockName = Annotated[str, Meta(pattern=r"^(mtp\.)?[0-9]{1,9}$")]


def draw_in_child(metrics: Path, to: Path) -> str:
    """Draw the loads that a run has logged, in a process of its own; return what to tell of it."""
    try:
        child = subprocess.run(
            python("-m", __name__, str(metrics), str(to)), env=without_launcher(os.environ), timeout=DRAWN_S,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _not_drawn(to, f"it took more than {DRAWN_S:g} s")
    except OSError as error:
        return _not_drawn(to, error.strerror)
    if child.returncode:
        last = child.stderr.strip().rpartition("\n")[2]
        return _not_drawn(to, f"its process ended with {child.returncode}: {last}")
    return child.stdout.strip()


def _not_drawn(to: Path, why: object) -> str:
    return f"{shown(to)}: the loads of experts can't be drawn: {shown(why)}"


def draw(metrics: Path, to: Path) -> str:
    """Draw the loads that a run has logged; return what to tell of it.

    Without matplotlib, or room for a file, nothing is drawn, and that is said: a picture is no
    reason to fail a run that is done.
    """
    try:
        return _drawn(metrics, to)
    except ImportError:
        return "pip install 'mpitrain[plot]' for a picture of the loads of experts"
    except (OSError, ValueError, CheckpointError) as error:
        return _not_drawn(to, getattr(error, "strerror", None) or error.args[0])


class _Line(msgspec.Struct):
    """What is drawn of a line of metrics.jsonl; somebody else may have written some of them."""

    step: int
    load_cv: float | None = None
    expert_loads: dict[BlockName, list[float]] = {}

    def __post_init__(self) -> None:
        if len(set(map(len, self.expert_loads.values()))) > 1:
            raise ValueError("blocks have different numbers of experts")


def _lines(metrics: Path) -> Iterator[_Line]:
    for number, (line, _) in enumerate(lines_of(metrics), start=1):
        try:
            yield decoded(line, _Line)
        except ValueError as error:
            raise ValueError(f"line {number} of {metrics.name}: {error}") from None


def _drawn(metrics: Path, to: Path) -> str:
    measured = list[_Line]()
    last_line = None
    for line in _lines(metrics):
        last_line = line if line.expert_loads else last_line
        if line.load_cv is not None:
            measured.append(msgspec.structs.replace(line, expert_loads={}))
    if last_line is None:
        return ""
    load_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    over_steps, last = figure.subplots(1, 2, width_ratios=(1, 1.3))
    over_steps.plot([line.step for line in measured], [line.load_cv for line in measured], color="#5B7FA6")
    over_steps.set(
        title="mean over blocks", xlabel="step", ylabel="coefficient of variation of loads", ylim=(0, None)
    )
    over_steps.spines[["top", "right"]].set_visible(False)
    blocks = last_line.expert_loads
    rows = [[share * len(row) for share in row] for row in blocks.values()]
    image = last.imshow(rows, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    last.set(title=f"loads in step {last_line.step}, 1: the mean", xlabel="expert", ylabel="block")
    last.set_yticks(range(len(rows)), list(blocks))
    figure.colorbar(image, ax=last, extend="max")
    with replacing(to) as file, rc_context({"svg.hashsalt": "mpitrain"}):  # equal runs, equal files
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"loads of experts: {to}"


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]), Path(sys.argv[2])))
