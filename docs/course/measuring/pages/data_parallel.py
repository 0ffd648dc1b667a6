"""Data parallelism: bytes of the all-reduce, buckets, and what of it is hidden."""

from measuring.report import Report
from measuring.runs import megabytes, same_bits, train
from measuring.timeline import drawn
from measuring.worked import Worked, sent, table

PLAIN = {"parallel.zero": 0, "comm.transport": "messages"}


def compute(report: Report) -> None:
    zero = "--set parallel.zero=0 --set comm.bucket_mb=1 --set batch.global=4"
    report.program(f"mpitrain program docs/course/small.toml --ranks 2 --rank 0 {zero} --traffic")
    _worked(report)


def _worked(report: Report) -> None:
    """Bytes of the sum above, and of llama3-8b's gradients on 64 ranks."""
    zero = "--set parallel.zero=0 --set comm.bucket_mb=1 --set batch.global=4"
    printed = report.run(f"mpitrain program docs/course/small.toml --ranks 2 --rank 0 {zero} --traffic")
    small = {"P": 1_607_808, "d": 2}
    large = {"P": 8_030_261_248, "d": 64}
    rows = [
        Worked(
            "sent a step and rank, MB",
            "2 * 4 * P * (d-1)/d / 10**6",
            small,
            sent(printed, "replicate", "all_reduce"),
        ),
        Worked("sent for llama3-8b on 64 ranks, GB", "2 * 4 * P * (d-1)/d / 10**9", large),
        Worked("seconds at 50 GB/s", "2 * 4 * P * (d-1)/d / 50e9", large),
    ]
    table(report, rows)


def measure(report: Report) -> None:
    _by_ranks(report)
    _by_buckets(report)


def _by_ranks(report: Report) -> None:
    """Bytes of a sum over 1, 2 and 4 ranks, and the bits of the losses in both orders of the sum."""
    runs = {}
    for order in ("run", "layout"):
        for ranks in (1, 2, 4):
            keys = {**PLAIN, "numerics.reproducible": order}
            runs[order, ranks] = train(report, ranks, f"{order}-{ranks}", keys)
    parameters = 1_607_808
    rows = [
        [
            ranks,
            megabytes(runs["run", ranks].sent("replicate")),
            megabytes(2 * 4 * parameters * (ranks - 1) / ranks),
            same_bits(runs["run", ranks], runs["run", 1]),
            same_bits(runs["layout", ranks], runs["layout", 1]),
        ]
        for ranks in (1, 2, 4)
    ]
    head = ["ranks", "sent a step and rank, MB", "2 P (d-1)/d of 4 bytes, MB"]
    head += ["bits of one rank's losses", 'with numerics.reproducible = "layout"']
    note = (
        f"P is {parameters:,} parameters. Each begins on a multiple of 1,024 elements in its bucket, and the "
        "pads are sent, too: the difference between the two columns of bytes."
    )
    report.table(head, rows, name="ranks", note=note)


def _by_buckets(report: Report) -> None:
    """The same sum in buckets of other sizes, with what of it is hidden."""
    rows = []
    for size in (16, 4, 1, 0.25):
        keys = {**PLAIN, "comm.bucket_mb": size, "run.steps": 12, "run.trace": 10}
        run = train(report, 2, f"bucket-{size}", keys)
        blocked, overlapped = (run.median("replicate", f"{what}_s") for what in ("blocked", "overlapped"))
        hidden = overlapped / (blocked + overlapped)
        rows.append([size, run.calls("replicate"), megabytes(run.sent("replicate")), f"{hidden:.0%}"])
    report.picture("timeline", drawn(run.folder / "trace.json", "A step of two replicas, buckets of 0.25 MB"))
    head = ["comm.bucket_mb", "sums a step", "sent a step and rank, MB", "of their time hidden"]
    note = (
        "Hidden is the median over ten steps of overlapped / (overlapped + blocked) on rank 0. Both ranks "
        "share two cores with other programs, so it is no measure of a network."
    )
    report.table(head, rows, name="table", note=note)
