"""How to choose: one model on 64 ranks in several layouts, memory against bytes against bubble."""

import re

from measuring.bars import stacked
from measuring.report import Report
from measuring.worked import Worked, figure, table

MODEL = "docs/course/llama3-8b.toml"
LAYOUTS = {
    "dp 64, zero 1": "--set parallel.zero=1",
    "dp 64, zero 3": "--set parallel.zero=3",
    "dp 64, zero 3, recompute": "--set parallel.zero=3 --set memory.recompute=full",
    "tp 8, dp 8": "--set parallel.tp=8",
    "tp 8, cp 2, dp 4": "--set parallel.tp=8 --set parallel.cp=2",
    "tp 8, pp 2, dp 4": "--set parallel.tp=8 --set parallel.pp=2",
    "pp 8, dp 8": "--set parallel.pp=8",
    "pp 8, dp 8, interleaved-zb": "--set parallel.pp=8 --set pipeline.schedule=interleaved-zb",
}
GROUPS = {"tp": "tp", "cp": "cp", "links": "pp"}
SENT = re.compile(r"^#   (\w+) .* ([\d.,]+)$", re.MULTILINE)
HELD = re.compile(r"^  on the device +([\d., ]+)$", re.MULTILINE)
BUBBLE = re.compile(r"bubble ([\d.]+%)")


def compute(report: Report) -> None:
    report.program(f"mpitrain memory {MODEL} --ranks 64 --set parallel.tp=8 --set parallel.pp=2")
    _worked(report)
    if not report.slow:
        return
    rows, bars = [], {}
    for name, keys in LAYOUTS.items():
        held = _held(report.run(f"mpitrain memory {MODEL} --ranks 64 {keys}"))
        sent = _sent(report.run(f"mpitrain program {MODEL} --ranks 64 --rank 0 {keys} --traffic"))
        bubble = "0.0%"
        if "pp" in name:
            bubble = BUBBLE.search(report.run(f"mpitrain check {MODEL} --ranks 64 {keys}"))[1]
        parts = [f"{sent.get(axis, 0.0) / 1000:.2f}" for axis in ("tp", "cp", "pp", "dp")]
        rows.append([name, f"{held / 1000:.1f}", *parts, bubble])
        bars[name] = {axis: gigabytes / 1000 for axis, gigabytes in sent.items()}
    head = [
        "layout",
        "GB on the device, at most",
        *(f"sent over {axis}, GB" for axis in ("tp", "cp", "pp", "dp")),
    ]
    note = (
        "Predicted, not run: memory of the rank that holds most, bytes that rank 0 sends in a step, and the "
        "bubble of the schedule with free messages. Nodes have 8 ranks."
    )
    report.table([*head, "bubble"], rows, note=note, computed=True)
    report.picture("sent", stacked("Bytes that rank 0 sends in a step, llama3-8b on 64 ranks", "GB", bars))


def _worked(report: Report) -> None:
    """State of a layout by hand, the time of a step, and the tokens that hide ZeRO-3's gathers."""
    printed = report.run(f"mpitrain memory {MODEL} --ranks 64 --set parallel.tp=8 --set parallel.pp=2")
    kinds = ("weights", "gradients", "moments")
    held = sum(figure(rf"^  {kind} [^\n]*? ([\d.,]+) +[\d.,]+$", printed) for kind in kinds) / 1000
    layout = {"P": 8_030_261_248, "t": 8, "p": 2, "d": 4}
    step = {"N": 7_504_924_672, "D": 128 * 4096, "n": 64, "F": 989e12}
    rows = [
        Worked("state with tp 8, pp 2, dp 4, GB", "(6 + 12/d) * P / (t*p) / 10**9", layout, round(held, 2)),
        Worked("seconds of a step at 40 % of the peak", "6 * N * D / (n * 0.4 * F)", step),
        Worked("tokens that hide a gather at 50 GB/s", "F / B", {"F": 989e12, "B": 50e9}),
        Worked("tokens that hide it at 450 GB/s", "F / B", {"F": 989e12, "B": 450e9}),
    ]
    table(report, rows)


def _held(printed: str) -> float:
    """Return the megabytes on the device of the stage that holds most."""
    return max(float(number.replace(",", "")) for number in HELD.search(printed)[1].split())


def _sent(printed: str) -> dict[str, float]:
    """Return the megabytes that are sent, by degree: tp, cp, pp, and dp for all others."""
    found: dict[str, float] = {}
    for axis, megabytes in SENT.findall(printed):
        group = GROUPS.get(axis.split("_")[0], "dp")
        found[group] = found.get(group, 0.0) + float(megabytes.replace(",", ""))
    return found
