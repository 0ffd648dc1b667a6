"""Five axes at once: who sits where, and what each axis carries, predicted and counted."""

import re

from measuring.bars import stacked
from measuring.report import Report
from mpitrain.plan.axes import MEANINGS

LAYOUT = (
    "--set model.family=mixtral --set parallel.tp=2 --set parallel.cp=2 --set parallel.pp=2 "
    "--set parallel.dp=2 --set parallel.ep=4"
)
LINE = re.compile(r"^  (\w+) +([\d,]+) +([\d,]+) +([\d.,]+)$", re.MULTILINE)


def compute(report: Report) -> None:
    report.program(f"mpitrain program docs/course/small.toml --ranks 16 --rank 5 {LAYOUT} --traffic")
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
