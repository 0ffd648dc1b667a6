"""Recomputation: what is kept, and how much more is computed."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import processor_s_a_step, same_bits, train

MODES = ("none", "selective", "every-k", "full")


def measure(report: Report) -> None:
    report.program("mpitrain program docs/course/small.toml --set memory.recompute=full --set batch.global=2")
    keys = {mode: {"memory.recompute": mode, "batch.micro": 4} for mode in MODES}
    runs = {mode: train(report, 1, mode, keys[mode]) for mode in MODES}
    times = {mode: processor_s_a_step(report, 1, mode, keys[mode]) for mode in MODES}
    none = runs["none"].held("activations")
    rows = [
        [
            mode,
            f"{run.held('activations'):.2f}",
            f"{run.held('activations') / none:.0%}",
            f"{times[mode] / times['none']:.2f}",
            same_bits(run, runs["none"]),
        ]
        for mode, run in runs.items()
    ]
    head = [
        "memory.recompute",
        "activations, MB",
        "of none",
        "processor time of a step, of none",
        "bits of none",
    ]
    note = (
        "Processor time is of 20 steps: of a run of 24 without that of one of 4. It is of one measurement; "
        "bytes and bits are exact."
    )
    report.table(head, rows, note=note)
    bars = {mode: {"activations": run.held("activations")} for mode, run in runs.items()}
    report.picture("kept", stacked("Activations that a microbatch of 4 sequences keeps", "MB", bars))
