"""Pipelines: bubble, peak and messages of each schedule, played and run."""

import json

from measuring.report import Report
from measuring.runs import Run, megabytes, same_bits, train
from measuring.worked import Worked, table

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "zbv",
    "v-half",
    "v-min",
    "dualpipe",
    "dualpipev",
    "seq1f1b",
)
DRAWN = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe")
SIZE = "--stages 4 --microbatches 8"


def compute(report: Report) -> None:
    keys = "--set parallel.pp=4"
    report.program(f"mpitrain program docs/course/small.toml --ranks 4 --rank 1 {keys} --traffic")
    rows = [_played(report, name) for name in SCHEDULES]
    head = ["pipeline.schedule", "makespan", "bubble", "most stashes of a rank", "messages a rank at most"]
    note = (
        "Played with F = I = W = 1 and free messages; a stash is one microbatch of a rank's whole share of "
        "layers."
    )
    report.table(head, rows, name="played", note=note, computed=True)
    for name in DRAWN if report.slow else ():
        report.draw(f"mpitrain schedule {name} {SIZE}", name)
    _worked(report)


def _worked(report: Report) -> None:
    """Makespans and bubbles of four stages and eight microbatches, F = I = W = 1."""
    work = "m*(F + I + W)"
    idle = {
        "1f1b": "(p-1)*(F + I + W)",
        "interleaved": "(p-1)*(F + I + W)/v",
        "zb-h1": "(p-1)*(F + I - W)",
        "interleaved-zb": "(p-1)*(F + I - W)/v",
        "zbv": "(p-1)*F/2",
    }
    values = {"p": 4, "m": 8, "v": 2, "F": 1, "I": 1, "W": 1}
    rows = []
    for name, formula in idle.items():
        played = json.loads(report.run(f"mpitrain schedule {name} {SIZE} --json"))
        rows.append(Worked(f"makespan of {name}", f"{work} + {formula}", values, played["makespan"]))
    played = json.loads(report.run(f"mpitrain schedule 1f1b {SIZE} --json"))
    bubble = round(played["bubble"], 4)
    rows.insert(1, Worked("bubble of gpipe and 1f1b", "(p-1)/(m + p-1)", values, bubble))
    table(report, rows)


def measure(report: Report) -> None:
    runs = {name: _run(report, name) for name in SCHEDULES}
    rows = [_row(name, run, runs["gpipe"]) for name, run in runs.items()]
    head = ["pipeline.schedule", "in flight on ranks 0 to 3", "sent between stages by rank 0, MB"]
    note = "In flight counts microbatches, once for each of a rank's stages that holds them."
    report.table([*head, "bits of gpipe"], rows, note=note)


def _run(report: Report, name: str) -> Run:
    return train(report, 4, name, {"parallel.pp": 4, "pipeline.schedule": name, "comm.transport": "messages"})


def _row(name: str, run: Run, gpipe: Run) -> list[object]:
    in_flight = ", ".join(map(str, run.metrics[1]["peak_in_flight"]))
    return [name, in_flight, megabytes(run.sent("links")), same_bits(run, gpipe)]


def _played(report: Report, name: str) -> list[object]:
    played = json.loads(report.run(f"mpitrain schedule {name} {SIZE} --json"))
    bubble = f"{played['bubble']:.1%}"
    return [
        name,
        f"{played['makespan']:g}",
        bubble,
        f"{max(played['peak_stashes']):g}",
        max(played["messages"]),
    ]
