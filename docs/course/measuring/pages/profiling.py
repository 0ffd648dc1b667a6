"""Profiling: one traced run, its timeline beside the simulation, and its waits."""

import re

from measuring.report import Report
from measuring.runs import train
from measuring.timeline import drawn
from measuring.worked import Worked, figure, parameters, table

KEYS = {"parallel.pp": 2, "run.steps": 10, "run.trace": 8, "comm.transport": "messages"}
AXIS = re.compile(r"^  (\w+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) \((\d+)\) +([\d.]+) +(\d+%)$", re.MULTILINE)


def compute(report: Report) -> None:
    report.program("mpitrain program docs/course/small.toml --ranks 2 --rank 1 --set parallel.pp=2")
    _worked(report)


def _worked(report: Report) -> None:
    """FLOPs of a token of llama3-8b, and its MFU at 8,000 tokens a second on an H100."""
    printed = report.run("mpitrain memory docs/course/llama3-8b.toml --ranks 64 --set parallel.zero=3")
    lookup = int(figure(r"^  embedding +([\d,]+)", printed))
    values = {"N": parameters(printed) - lookup, "L": 32, "h": 4096, "s": 4096}
    token = "6*N + 6*L*h*s"
    rate = {"r": 8000, "F": 989e12}
    rows = [
        Worked(
            "GFLOP a token", f"({token}) / 10**9", values, figure(r"^  all .* ([\d.e+]+) +100", printed) / 1e9
        ),
        Worked("MFU at 8,000 tokens/s, %", f"100 * r * ({token}) / F", {**values, **rate}),
        Worked("HFU with full recomputation, %", f"100 * r * 4/3 * ({token}) / F", {**values, **rate}),
    ]
    table(report, rows)


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
