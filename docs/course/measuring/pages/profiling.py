"""Profiling: one traced run, its timeline beside the simulation, and its waits."""

import re

from measuring.report import Report
from measuring.runs import train
from measuring.timeline import drawn

KEYS = {"parallel.pp": 2, "run.steps": 10, "run.trace": 8, "comm.transport": "messages"}
AXIS = re.compile(r"^  (\w+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) \((\d+)\) +([\d.]+) +(\d+%)$", re.MULTILINE)


def compute(report: Report) -> None:
    report.program("mpitrain program docs/course/small.toml --ranks 2 --rank 1 --set parallel.pp=2")


def measure(report: Report) -> None:
    run = train(report, 2, "traced", KEYS)
    table = run.output.partition("communication, a step and rank")[2]
    rows = [
        [axis, int(calls), sent, blocked, overlapped, hidden]
        for axis, calls, sent, blocked, _, _, overlapped, hidden in AXIS.findall(table)
    ]
    head = ["axis", "calls a step", "MB sent", "blocked, ms", "overlapped, ms", "hidden"]
    note = "Times are of two ranks that share two cores with other programs: read the ratios."
    report.table(head, rows, note=note)
    report.picture("timeline", drawn(run.folder / "trace.json", "Two stages of 1F1B, as they ran"))
    compared = "mpitrain schedule compare --trace runs/traced/trace.json"
    report.text("compared", report.draw(compared, "compared").rstrip(), compared)
