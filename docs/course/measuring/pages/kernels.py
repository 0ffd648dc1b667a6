"""Kernels: passes over memory of functions as they are written, fused, and by tiles."""

import json

from measuring.bars import stacked
from measuring.report import Report
from measuring.worked import Worked, table

COMMAND = "python docs/course/measuring/passes.py"
WORDS = {
    "gated": "silu(gate) * up",
    "norm": "RMSNorm",
    "rotated": "rotary positions",
    "loss": "cross-entropy",
    "attention": "attention by its formula, T = 512",
    "flash": "flash attention, T = 512",
}


def compute(report: Report) -> None:
    report.program("mpitrain program docs/course/small.toml --set batch.global=2 --set run.compile=true")
    _worked(report)
    if not report.slow:
        return
    found = json.loads(report.run(COMMAND))
    rows = [
        [WORDS[name], operations, f"{moved / 1e6:.2f}", f"{least / 1e6:.2f}", f"{moved / least:.1f}"]
        for name, operations, moved, least in found["functions"]
    ]
    head = ["function", "operations", "MB read and written", "MB if fused", "times as much"]
    note = (
        "Counted over the operations of torch that run, views left out. Fused means that each input is read "
        "once and each output written once."
    )
    report.table(head, rows, note=note, computed=True)
    bars = {
        WORDS[name]: {"fused": least / 1e6, "beyond that": (moved - least) / 1e6}
        for name, _, moved, least in found["functions"]
    }
    report.picture("passes", stacked("Bytes that a function moves through memory", "MB", bars))
    report.commands.append(COMMAND)
    rows = [["a matrix of 128 x 128, " + walk, lines] for walk, lines in found["lines"]]
    rows += [[f"product of 32 x 32, tiles of {tile}", numbers // 16] for tile, numbers in found["products"]]
    note = (
        "Counted in a model of a cache: 32 lines of 16 numbers, of which the one goes that was used the "
        "longest time ago. Tiles of 32 are the loop without tiles."
    )
    report.table(["walk", "lines fetched"], rows, name="tiles", note=note, computed=True)


def _worked(report: Report) -> None:
    """Arithmetic intensity against the ridge of an H100."""
    counted = json.loads(report.run("python docs/course/measuring/hardware.py"))
    peak = {"F": 989e12, "B": 3.35e12}
    square, thin = (round(counted["intensity"][name], 1) for name in ("square", "thin"))
    rows = [
        Worked("ridge of an H100, FLOP a byte", "F / B", peak, round(counted["ridge"], 1)),
        Worked("product of 4096 x 4096 x 4096", "2 * n**3 / (3 * 2 * n**2)", {"n": 4096}, square),
        Worked("the same with 8 rows", "2*m*n*n / (2 * (n*n + 2*m*n))", {"n": 4096, "m": 8}, thin),
        Worked("sum of two tensors", "1 / (3 * 2)", {}),
        Worked("its share of the peak, %", "100 * B / (6 * F)", peak),
    ]
    table(report, rows)
