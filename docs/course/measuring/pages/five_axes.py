"""Five axes at once: who sits where, and what each axis carries, predicted and counted."""

import re

from measuring.bars import stacked
from measuring.report import Report
from measuring.worked import Worked, figure, table
from mpitrain.plan.axes import MEANINGS

LAYOUT = (
    "--set model.family=mixtral --set parallel.tp=2 --set parallel.cp=2 --set parallel.pp=2 "
    "--set parallel.dp=2 --set parallel.ep=4"
)
LINE = re.compile(r"^  (\w+) +([\d,]+) +([\d,]+) +([\d.,]+)$", re.MULTILINE)


def compute(report: Report) -> None:
    report.program(f"mpitrain program docs/course/small.toml --ranks 16 --rank 5 {LAYOUT} --traffic")
    _worked(report)
    if not report.slow:
        return
    printed = report.run(f"mpirun -n 16 mpitrain run --dry-run docs/course/small.toml {LAYOUT}")
    rows = [
        [axis, MEANINGS.get(axis, ""), operations, messages, megabytes]
        for axis, operations, messages, megabytes in LINE.findall(printed)
    ]
    head = ["axis", "carries", "operations", "messages", "MB of all ranks"]
    note = (
        "The dry run sends every message of a step and compares what was counted with the recipes, to the "
        "byte. Nothing is computed. Where ranks share memory, bytes are read and no message is sent."
    )
    report.table(head, rows, note=note, computed=True)
    sent = {row[0]: {"MB": float(str(row[4]).replace(",", ""))} for row in rows if row[0] != "all"}
    report.picture("axes", stacked("Bytes that 16 ranks send in a step, by axis", "MB", sent))
    proof = report.run("mpitrain verify docs/course/small.toml --layout tp=2,cp=2,pp=2")
    report.text("verify", proof, report.commands.pop())


def _worked(report: Report) -> None:
    """The number of the rank above from its coordinates, and what is left for the experts' replicas."""
    printed = report.run(f"mpitrain program docs/course/small.toml --ranks 16 --rank 5 {LAYOUT} --traffic")
    place = {axis: int(figure(rf"^# rank 5: .*\b{axis} (\d+)", printed)) for axis in ("tp", "cp", "dp", "pp")}
    letters = {"t": place["tp"], "c": place["cp"], "d": place["dp"], "p": place["pp"]}
    sizes = {"T": 2, "C": 2, "D": 2, "P": 2, "E": 4}
    rows = [
        Worked("world", "T * C * D * P", sizes, 16),
        Worked("rank of tp 1, cp 0, dp 1, pp 0", "t + T*(c + C*(d + D*p))", {**sizes, **letters}, 5),
        Worked("replicas of an expert", "T * C * D / E", sizes),
    ]
    table(report, rows)
