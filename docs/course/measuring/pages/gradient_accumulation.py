"""Gradient accumulation: the same step in more and smaller microbatches."""

import re

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import furthest, train
from measuring.worked import Worked, table

SHAPES = ((8, 8), (8, 4), (8, 2), (8, 1), (32, 1), (64, 1))


def compute(report: Report) -> None:
    report.program("mpitrain program docs/course/small.toml --set batch.global=8 --set batch.micro=2")
    _worked(report)


def _worked(report: Report) -> None:
    """Microbatches of the program above, and of llama3-8b on 64 ranks."""
    printed = report.run("mpitrain program docs/course/small.toml --set batch.global=8 --set batch.micro=2")
    small = len(set(re.findall(r"\bF\d+@0", printed)))
    keys = "--set parallel.zero=3"
    printed = report.run(f"mpitrain program docs/course/llama3-8b.toml --ranks 64 --rank 0 {keys} --traffic")
    large = len(set(re.findall(r"\bF\d+@0", printed)))
    rows = [
        Worked("microbatches of small.toml", "B / (b * d)", {"B": 8, "b": 2, "d": 1}, small),
        Worked("microbatches of llama3-8b on 64 ranks", "B / (b * d)", {"B": 128, "b": 1, "d": 64}, large),
        Worked("tokens of its step", "b * m * d * s", {"b": 1, "m": 2, "d": 64, "s": 4096}),
    ]
    table(report, rows)


def measure(report: Report) -> None:
    runs = {
        shape: train(
            report, 1, f"{shape[0]}-by-{shape[1]}", {"batch.global": shape[0], "batch.micro": shape[1]}
        )
        for shape in SHAPES
    }
    rows = []
    bars = {}
    for (whole, micro), run in runs.items():
        same_batch = furthest(run, runs[8, 8]) if whole == 8 else "other tokens"
        rows.append(
            [
                whole,
                micro,
                whole // micro,
                f"{run.held('activations'):.2f}",
                f"{run.held('gradients'):.2f}",
                same_batch,
            ]
        )
        bars[f"{whole} in {whole // micro}"] = {kind: run.held(kind) for kind in ("gradients", "activations")}
    head = ["batch.global", "batch.micro", "microbatches", "activations, MB", "gradients, MB"]
    report.table([*head, "losses differ from the first row by"], rows)
    report.picture("memory", stacked("Memory by sequences a step and microbatches", "MB", bars))
