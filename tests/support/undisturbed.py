"""Runs that nobody disturbed, which those with kills are compared with."""

from collections.abc import Callable
from pathlib import Path

from launch import run_several


def undisturbed_runs(folder: Path, text: Path, layouts: list[tuple[int, dict]], settings: dict) -> Callable:
    """Return a function: the run directory of a run of the layout with this number; each is run once."""

    def run(number: int) -> Path:
        run_dir = folder / str(number)
        if not run_dir.exists():
            num_ranks, layout = layouts[number]
            run_several(num_ranks, text, {run_dir: settings | layout})
        return run_dir

    return run
