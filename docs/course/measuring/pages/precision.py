"""Precision: bytes of the state and on the wire, and the loss after 60 steps."""

import json

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import Run, megabytes, train
from measuring.worked import Worked, figure, table

KINDS = ("weights", "gradients", "moments", "activations")
SETTINGS = {
    "fp64": {"precision.compute": "fp64"},
    "fp32": {},
    "bf16": {"precision.compute": "bf16"},
    "fp16": {"precision.compute": "fp16"},
    "fp8": {"precision.compute": "fp8"},
    "fp32, moments bf16": {"optimizer.moments": "bf16"},
    "fp32, reduce bf16": {"precision.reduce": "bf16"},
}
SHAPE = {"model.layers": 4, "run.steps": 60, "comm.transport": "messages"}


def compute(report: Report) -> None:
    report.program("mpitrain memory docs/course/small.toml --ranks 2 --set precision.compute=bf16")
    _worked(report)


def _worked(report: Report) -> None:
    """Half a unit in the last place, and the bytes of a parameter."""
    printed = report.run("mpitrain memory docs/course/small.toml --ranks 2 --set precision.compute=bf16")
    state = figure(r"parameters, (\d+) bytes each", printed)
    lost = json.loads(report.run("python docs/course/measuring/hardware.py"))["least_change"]
    rows = [
        Worked("lost in a bf16 weight of 1", "2**-p", {"p": 8}, lost["bfloat16"]),
        Worked("lost in an fp16 weight of 1", "2**-p", {"p": 11}, lost["float16"]),
        Worked("lost in an fp32 weight of 1", "2**-p", {"p": 24}, lost["float32"]),
        Worked("bytes of a parameter in bf16", "w + M + g + v", {"w": 2, "M": 4, "g": 4, "v": 8}, state),
    ]
    table(report, rows)


def measure(report: Report) -> None:
    runs = {}
    for name, keys in SETTINGS.items():
        runs[name] = train(report, 2, name.replace(", ", "-").replace(" ", "-"), {**SHAPE, **keys})
    rows = [_row(name, run) for name, run in runs.items()]
    head = ["precision.compute", *(f"{kind}, MB" for kind in KINDS), "sent a step and rank, MB"]
    head += ["mean loss of the last 10 steps", "skipped steps"]
    report.table(head, rows, note="Loss is of one seed. How far fp64 and fp32 are apart is what chance does.")
    bars = {name: {kind: run.held(kind) for kind in KINDS} for name, run in runs.items()}
    report.picture("memory", stacked("State and activations of one of two ranks, by precision", "MB", bars))


def _row(name: str, run: Run) -> list[object]:
    held = [f"{run.held(kind):.2f}" for kind in KINDS]
    loss = sum(run.losses[-10:]) / 10
    skipped = sum(line["skipped"] for line in run.metrics)
    return [name, *held, megabytes(run.metrics[30]["comm"]["shard"]["bytes"]), f"{loss:.3f}", skipped]
