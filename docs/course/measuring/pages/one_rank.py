"""One rank and its memory: what is held, and what of it grows with a microbatch."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import train
from measuring.worked import Worked, figure, parameters, table

KINDS = ("weights", "gradients", "moments", "activations")


def compute(report: Report) -> None:
    report.program("mpitrain program docs/course/small.toml --set batch.global=2")
    _worked(report)


def _worked(report: Report) -> None:
    """The state, and the operations of a step of 8 sequences of 128 tokens."""
    printed = report.run("mpitrain memory docs/course/small.toml")
    held = sum(figure(rf"^  {kind} .* ([\d.,]+)$", printed) for kind in ("weights", "gradients", "moments"))
    num = parameters(printed)
    operations = figure(r"^  all .* ([\d.e+]+)$", printed)
    tokens = {"N": num, "D": 8 * 128}
    attention = {"L": 8, "h": 128, "s": 128}
    rows = [
        Worked("state, MB", "16 * P / 10**6", {"P": num}, held),
        Worked("products of a step, GFLOP", "6 * N * D / 10**9", tokens),
        Worked(
            "and attention, GFLOP",
            "(6 * N + 6 * L * h * s) * D / 10**9",
            tokens | attention,
            operations / 1e9,
        ),
    ]
    table(report, rows)


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
