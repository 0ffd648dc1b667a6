"""Pipelines: bubble, peak and messages of each schedule, played and run."""

import json

from measuring.report import Report
from measuring.runs import Run, megabytes, same_bits, train

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


def measure(report: Report) -> None:
    keys = "--set parallel.pp=4"
    report.program(f"mpitrain program docs/course/small.toml --ranks 4 --rank 1 {keys} --traffic")
    runs = {name: _run(report, name) for name in SCHEDULES}
    rows = [_row(report, name, run, runs["gpipe"]) for name, run in runs.items()]
    head = ["pipeline.schedule", "makespan", "bubble", "most stashes of a rank", "messages a rank at most"]
    head += ["in flight on ranks 0 to 3, measured", "sent between stages by rank 0, MB", "bits of gpipe"]
    note = (
        "Played with F = I = W = 1 and free messages; a stash is one microbatch of a rank's whole share of "
        "layers. Columns from the sixth on are of training runs; in flight counts microbatches, once for "
        "each of a rank's stages that holds them."
    )
    report.table(head, rows, note=note)
    for name in DRAWN:
        report.draw(f"mpitrain schedule {name} {SIZE}", name)


def _run(report: Report, name: str) -> Run:
    return train(report, 4, name, {"parallel.pp": 4, "pipeline.schedule": name, "comm.transport": "messages"})


def _row(report: Report, name: str, run: Run, gpipe: Run) -> list[object]:
    played = json.loads(report.run(f"mpitrain schedule {name} {SIZE} --json"))
    in_flight = ", ".join(map(str, run.metrics[1]["peak_in_flight"]))
    return [
        name,
        f"{played['makespan']:g}",
        f"{played['bubble']:.1%}",
        f"{max(played['peak_stashes']):g}",
        max(played["messages"]),
        in_flight,
        megabytes(run.sent("links")),
        same_bits(run, gpipe),
    ]
