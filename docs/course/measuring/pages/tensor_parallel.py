"""Tensor and sequence parallelism: what is divided, and what each block sends for it."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import furthest, megabytes, train
from measuring.worked import Worked, sent, table

LAYOUTS = {
    "1": (1, {}),
    "2, without sequence": (2, {"parallel.tp": 2, "parallel.sequence": "false"}),
    "2": (2, {"parallel.tp": 2}),
    "2, async_tp": (2, {"parallel.tp": 2, "parallel.async_tp": "true"}),
    "4, without sequence": (4, {"parallel.tp": 4, "parallel.sequence": "false"}),
    "4": (4, {"parallel.tp": 4}),
}
HEADS = {"model.heads": 4, "model.kv_heads": 4, "comm.transport": "messages"}


def compute(report: Report) -> None:
    keys = "--set parallel.tp=2 --set batch.global=2"
    report.program(f"mpitrain program docs/course/small.toml --ranks 2 --rank 0 {keys} --traffic")
    if report.slow:
        proof = report.run("mpitrain verify docs/course/small.toml --layout tp=2")
        report.text("verify", proof, report.commands.pop())
    _worked(report)


def _worked(report: Report) -> None:
    """Bytes of the program above: 8 blocks, 2 microbatches of one sequence of 128 tokens."""
    keys = "--set parallel.tp=2 --set batch.global=2"
    printed = report.run(f"mpitrain program docs/course/small.toml --ranks 2 --rank 0 {keys} --traffic")
    values = {"m": 2, "L": 8, "s": 128, "b": 1, "h": 128, "w": 4, "t": 2}
    moved = sent(printed, "tp", "all_gather", "reduce_scatter", "all_reduce")
    blocks = "m * 4*L * 2 * s*b*h*w * (t-1)/t / 10**6"
    rows = [
        Worked("sent for the blocks, MB", blocks, values),
        Worked("with two sums at the ends, MB", blocks.replace("4*L", "(4*L + 2)"), values, round(moved, 3)),
    ]
    table(report, rows)


def measure(report: Report) -> None:
    runs = {}
    for name, (ranks, layout) in LAYOUTS.items():
        place = f"tp-{name.replace(', ', '-').replace(' ', '-')}"
        runs[name] = train(report, ranks, place, {**HEADS, **layout})
    rows = []
    for name, run in runs.items():
        sent = run.sent("tp")
        held = [f"{run.held(kind):.2f}" for kind in ("weights", "moments", "activations")]
        rows.append([name, megabytes(sent), run.calls("tp"), *held, furthest(run, runs["1"])])
    head = ["parallel.tp", "sent a step and rank, MB", "operations a step", "weights, MB", "moments, MB"]
    report.table([*head, "activations, MB", "losses differ from one rank by"], rows)
    bars = {
        name: {kind: run.held(kind) for kind in ("weights", "moments", "activations")}
        for name, run in runs.items()
    }
    report.picture("memory", stacked("Memory of one rank, by parallel.tp", "MB", bars))
