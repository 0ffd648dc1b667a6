"""ZeRO 1, 2, 3: what is divided, what is sent instead, and the bits."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import Run, megabytes, same_bits, train
from measuring.timeline import drawn

STAGES = {
    "0": {"parallel.zero": 0},
    "1": {"parallel.zero": 1},
    "2": {"parallel.zero": 2},
    "2, reduce = step": {"parallel.zero": 2, "parallel.reduce": "step"},
    "3": {"parallel.zero": 3},
    "3, gather = step": {"parallel.zero": 3, "parallel.gather": "step"},
    "3, reduce = step": {"parallel.zero": 3, "parallel.reduce": "step"},
}
KINDS = ("weights", "gradients", "moments", "gathered", "unreduced")
SHAPE = {"batch.global": 16, "comm.transport": "messages"}


def compute(report: Report) -> None:
    for stage in (1, 3):
        keys = f"--set parallel.zero={stage} --set batch.global=4"
        command = f"mpitrain program docs/course/small.toml --ranks 4 --rank 0 {keys} --traffic"
        report.program(command, name=f"program-{stage}")


def measure(report: Report) -> None:
    runs = {
        name: train(report, 4, "zero-" + name.replace(", ", "-").replace(" = ", "-"), {**SHAPE, **keys})
        for name, keys in STAGES.items()
    }
    each = train(report, 4, "zero-0-each", {**SHAPE, "parallel.zero": 0, "parallel.reduce": "microbatch"})
    rows = [_row(name, run, runs["0"], each) for name, run in runs.items()]
    head = ["parallel.zero", "sent a step and rank, MB", *(f"{kind}, MB" for kind in KINDS)]
    head += ["bits of 0", 'bits of 0 with reduce = "microbatch"']
    report.table(head, rows)
    bars = {
        name: {kind: run.held(kind) for kind in KINDS if kind in run.memory} for name, run in runs.items()
    }
    report.picture("memory", stacked("State of one of four ranks", "MB", bars))
    traced = train(report, 2, "traced", {"parallel.zero": 3, "run.steps": 8, "run.trace": 6})
    report.picture("timeline", drawn(traced.folder / "trace.json", "A step of ZeRO-3 on two ranks"))


def _row(name: str, run: Run, zero: Run, each: Run) -> list[str]:
    sent = sum(run.sent(axis) for axis in ("shard", "replicate"))
    held = [f"{run.held(kind):.2f}" if kind in run.memory else "" for kind in KINDS]
    return [name, megabytes(sent), *held, same_bits(run, zero), same_bits(run, each)]
