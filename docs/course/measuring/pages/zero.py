"""ZeRO 1, 2, 3: what is divided, what is sent instead, and the bits."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import Run, megabytes, same_bits, train
from measuring.timeline import drawn
from measuring.worked import Worked, figure, sent, table

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
    _worked(report)


def _worked(report: Report) -> None:
    """State of llama3-8b in bf16 on 64 ranks, and bytes that the programs above send."""
    rows = []
    for stage, formula in (("0", "18 * P"), ("1", "(6 + 12/N) * P"), ("3", "18/N * P")):
        keys = f"--ranks 64 --set parallel.zero={stage}"
        printed = report.run(f"mpitrain memory docs/course/llama3-8b.toml {keys}")
        kinds = ("weights", "gradients", "moments")
        held = sum(figure(rf"^  {kind} .* ([\d.,]+)$", printed) for kind in kinds) / 1000
        values = {"P": 8_030_261_248, "N": 64}
        rows.append(Worked(f"state of ZeRO-{stage}, GB", f"{formula} / 10**9", values, round(held, 2)))
    for stage, factor in ((1, 2), (3, 3)):
        keys = f"--set parallel.zero={stage} --set batch.global=4"
        printed = report.run(f"mpitrain program docs/course/small.toml --ranks 4 --rank 0 {keys} --traffic")
        moved = sent(printed, "shard", "reduce_scatter", "all_gather")
        values = {"P": 1_607_808, "N": 4}
        formula = f"{factor} * 4 * P * (N-1)/N / 10**6"
        rows.append(Worked(f"sent by ZeRO-{stage}, small.toml, MB", formula, values, round(moved, 2)))
    table(report, rows)


def measure(report: Report) -> None:
    runs = {
        name: train(report, 4, "zero-" + name.replace(", ", "-").replace(" = ", "-"), {**SHAPE, **keys})
        for name, keys in STAGES.items()
    }
    each = train(report, 4, "zero-0-each", {**SHAPE, "parallel.zero": 0, "parallel.reduce": "microbatch"})
    commands = list(report.commands)
    note = "MB of one of four ranks; sent is by step."
    report.table(
        ["parallel.zero", "sent", *KINDS], [_row(*item) for item in runs.items()], name="table", note=note
    )
    rows = [[name, same_bits(run, runs["0"]), same_bits(run, each)] for name, run in runs.items()]
    report.commands = commands
    report.table(
        ["parallel.zero", "bits of 0", 'of 0 with parallel.reduce = "microbatch"'], rows, name="bits"
    )
    bars = {
        name: {kind: run.held(kind) for kind in KINDS if kind in run.memory} for name, run in runs.items()
    }
    report.picture("memory", stacked("State of one of four ranks", "MB", bars))
    traced = train(report, 2, "traced", {"parallel.zero": 3, "run.steps": 8, "run.trace": 6})
    report.picture("timeline", drawn(traced.folder / "trace.json", "A step of ZeRO-3 on two ranks"))


def _row(name: str, run: Run) -> list[str]:
    sent_mb = sum(run.sent(axis) for axis in ("shard", "replicate"))
    held = [f"{run.held(kind):.2f}" if kind in run.memory else "" for kind in KINDS]
    return [name, megabytes(sent_mb), *held]
