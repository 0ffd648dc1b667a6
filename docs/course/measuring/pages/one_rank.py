"""One rank and its memory: what is held, and what of it grows with a microbatch."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import train

KINDS = ("weights", "gradients", "moments", "activations")


def compute(report: Report) -> None:
    report.program("mpitrain program docs/course/small.toml --set batch.global=2")


def measure(report: Report) -> None:
    rows = []
    bars = {}
    for micro in (1, 2, 4, 8):
        run = train(report, 1, f"micro-{micro}", {"batch.micro": micro})
        rows.append([micro, *(_both(run.memory[kind]) for kind in KINDS)])
        bars[f"microbatch of {micro}"] = {kind: run.held(kind) for kind in KINDS}
    head = ["sequences a microbatch", *(f"{kind}, MB: predicted / measured" for kind in KINDS)]
    report.table(head, rows)
    report.picture("memory", stacked("Memory of one rank, by the size of its microbatch", "MB", bars))


def _both(pair: tuple[float, float | None]) -> str:
    predicted, measured = pair
    return f"{predicted:.2f} / {'not measured' if measured is None else f'{measured:.2f}'}"
