"""Recomputation: what is kept, and how much more is computed and moved."""

import json
import re

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import SMALL, same_bits, train
from measuring.worked import Worked, figure, table

SENT = re.compile(r"^#   tp .* (\d+) +[\d.]+ +([\d.]+)$", re.MULTILINE)
MODES = ("none", "selective", "every-k", "full")


def compute(report: Report) -> None:
    report.program("mpitrain program docs/course/small.toml --set memory.recompute=full --set batch.global=2")
    _under_tp(report)
    _worked(report)


def _worked(report: Report) -> None:
    """Activations of a block of llama3-8b, one sequence, by the formulas of Korthikanti et al."""
    printed = report.run("mpitrain memory docs/course/llama3-8b.toml --ranks 64 --set parallel.zero=3")
    shape = {"s": 4096, "b": 1, "h": 4096}
    kept, selective, full = (
        figure(rf"2 sbh: .*{kind} ([\d,.]+) MB", printed) for kind in ("all", "flash", "full")
    )
    rows = [
        Worked("nothing recomputed, MB", "s*b*h * (34 + 5*a*s/h) / 10**6", {**shape, "a": 32}, kept),
        Worked("attention recomputed, MB", "34 * s*b*h / 10**6", shape, selective),
        Worked("block recomputed, MB", "2 * s*b*h / 10**6", shape, full),
        Worked("best k of 32 layers", "sqrt(L)", {"L": 32}),
        Worked("layers' worth kept at that k", "2 * sqrt(L)", {"L": 32}),
    ]
    table(report, rows)


def measure(report: Report) -> None:
    runs = {mode: train(report, 1, mode, {"memory.recompute": mode, "batch.micro": 4}) for mode in MODES}
    work = {mode: _work(report, mode) for mode in MODES}
    rows = []
    for mode, run in runs.items():
        kept = run.held("activations")
        times = [work[mode][what] / work["none"][what] for what in ("flops", "bytes")]
        share = kept / runs["none"].held("activations")
        rows.append(
            [mode, f"{kept:.2f}", f"{share:.0%}", *(f"{x:.2f}" for x in times), same_bits(run, runs["none"])]
        )
    head = ["memory.recompute", "activations, MB", "of none"]
    head += ["FLOPs of a step, of none", "bytes through memory, of none", "bits of none"]
    note = (
        "FLOPs are of products and attention, bytes are read and written by all operations of torch in a "
        "step."
    )
    report.table(head, rows, note=note)
    bars = {mode: {"activations": run.held("activations")} for mode, run in runs.items()}
    report.picture("kept", stacked("Activations that a microbatch of 4 sequences keeps", "MB", bars))


def _under_tp(report: Report) -> None:
    """What tensor parallelism sends in a step, by mode."""
    rows = []
    for mode in MODES:
        keys = f"--set parallel.tp=2 --set memory.recompute={mode}"
        printed = report.run(f"mpitrain program {SMALL} --ranks 2 --rank 0 {keys} --traffic")
        found = [(int(calls), float(sent)) for calls, sent in SENT.findall(printed)]
        rows.append([mode, sum(calls for calls, _ in found), f"{sum(sent for _, sent in found):.1f}"])
    report.table(
        ["memory.recompute", "operations of tp", "sent a step and rank, MB"],
        rows,
        name="under-tp",
        computed=True,
    )


def _work(report: Report, mode: str) -> dict[str, int]:
    """Return what one step computes and moves, counted operation by operation."""
    keys = f"run.dir=runs/work-{mode} memory.recompute={mode} batch.micro=4 run.steps=3"
    printed = report.run(f"python docs/course/measuring/one_step.py {SMALL} {keys}")
    return json.loads(printed.splitlines()[-1])
