"""Steps of twenty-one layouts beside their predictions, after one `mpitrain bench machine` here.

    python benchmarks/predictions.py                 a quarter of an hour on two slow cores, or five minutes
    python benchmarks/predictions.py --machine FILE  by figures that were measured before
    python benchmarks/predictions.py --steps 3 --set model.width=256
    python benchmarks/predictions.py --hosts 1gbit   on two hosts that such a cable joins, as root:
                                                     network namespaces (ip and tc make them)

1, 2, 4 and 8 ranks; dp, ZeRO-3, tp, async tp, cp, pp with four schedules, ep, combinations; fp32 and bf16.
Prints the rows of `mpitrain sweep`, medians and the worst of |measured / predicted - 1|, and the rank
correlation; all of that, too, had the processor been as fast beside each layout as when it was measured:
a processor that others share changes by tens of percent within minutes. Run it where nothing else runs.

%s
"""

import argparse
import csv
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

MEASURED = """Two cores of an AMD EPYC (Zen 5), MPICH 5.0.2, 2026-11-28, --steps 3, four runs in an hour: 3.1,
6.6, 5.9 and 0.8 % in the median, 6.2, 13.7, 10.3 and 5.7 % at worst; rank correlation 0.98, 0.95, 0.97, 0.98.
Since the third, attention has oneDNN's products at this size; before the fourth, whose rows
docs/guides/planning.md has, the 4 % that ranks of one CPU add was fitted to the others. A fifth, later that
day, by the same constants: 3.7 and 11.0 %, 0.94.

Two cores of an Intel Xeon with AMX, other programs beside it, 2026-11-26: 9.6 % in the median, 30 % at worst
(tp=2 pp=2 on 8 ranks); of one rank in fp32 at most 1 %; rank correlation 0.93. The same step of dp=2 took
2.23 to 2.39 s there within half an hour.

Two cores of such a Xeon, MPICH 5.0.2, nothing beside it, 2026-11-30: 1.2 % in the median, 11.0 % at worst
(tp=2 pp=2 zero=1 on 8 ranks), rank correlation 0.98. Another, 2026-12-01: 1.7 % in the median, 8.2 % at
worst (the same layout), 0.98.

Two cores of an AMD EPYC (Zen 3), other programs beside it, 2026-11-28, two runs, --steps 3: 6.4 and 5.7 % in
the median, 26 and 24 % at worst (async tp before its pieces were counted, and zero=1 in bf16, 6 % in the run
before); rank correlation 0.88 and 0.89. What a message costs was fitted to tp=2 between them. A third run,
six hours later, nothing fitted to it: 4.0 % in the median, 17 % at worst (pp=4), rank correlation 0.96. A
fourth, since half of a bubble stays where ranks take turns (fitted to other runs there): 4.6 % in the median,
15.5 % at worst (experts), rank correlation 0.96; by the rate of products 4.4 % and 12.6 %. Layouts of 4 and 8
ranks took 0.99 to 1.15 of their predictions, 0.91 to 1.17 in the third.

--hosts 1gbit, a core of that Xeon each, 2026-11-27, two runs: 7.7 and 11.0 % in the median, 30 and 23 % at
worst (pp=4 before it waited for the other host, and zero=1 in bf16); rank correlation 0.80. Of that Zen 3,
2026-11-28: 4.6 % in the median, 13.4 % at worst (tp=2 zero=1); rank correlation 0.780. Of that Zen 5,
2026-11-28, two runs: 4.4 and 3.6 % in the median, 15.5 and 17.2 % at worst (tp=2, and zero=1 in bf16); rank
correlation 0.95 and 0.97."""
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from hosts import Hosts, two_hosts  # noqa: E402
from launch import MPITRAIN, Done, mpirun, tail  # noqa: E402

MODEL = {
    "model.layers": 8, "model.width": 512, "model.heads": 8, "model.kv_heads": 4, "model.ffn": 1408,
    "data.sequence": 256, "batch.global": 16, "batch.micro": 2,
}  # fmt: skip
EXPERTS = "model.family=mixtral experts.count=4 experts.active=2 experts.width=704"
PIPELINE = "parallel.pp=2 pipeline.schedule="
LAYOUTS = {
    1: ("precision.compute=fp32", "precision.compute=bf16", "memory.recompute=full", "batch.micro=4"),
    2: (
        "parallel.zero=1", "parallel.zero=1 precision.compute=bf16", "parallel.zero=3", "parallel.tp=2",
        "parallel.tp=2 parallel.async_tp=true", "parallel.cp=2", f"{PIPELINE}1f1b", f"{PIPELINE}gpipe",
        f"{PIPELINE}interleaved", f"{PIPELINE}zb-h1", f"{EXPERTS} parallel.ep=2",
    ),
    4: (
        "parallel.tp=2 parallel.zero=1", "parallel.pp=2 parallel.zero=1", "parallel.pp=4",
        "parallel.tp=2 parallel.pp=2",
    ),
    8: ("parallel.zero=3", "parallel.tp=2 parallel.pp=2 parallel.zero=1"),
}  # fmt: skip
OVER_HOSTS = {  # as many ranks on each
    2: (
        "parallel.zero=1", "parallel.zero=1 precision.compute=bf16", "parallel.zero=3",
        "parallel.zero=3 parallel.gather=step", f"{PIPELINE}1f1b", f"{PIPELINE}zb-h1", "parallel.cp=2",
        "parallel.tp=2",
    ),
    4: (
        "parallel.tp=2 parallel.zero=1", "parallel.tp=2 parallel.pp=2", "parallel.pp=4",
        "parallel.pp=2 parallel.zero=1", "parallel.zero=3 parallel.dp_shard=2", "parallel.zero=1",
    ),
}  # fmt: skip
COLUMNS = ("measured_s", "predicted_s", "speed")
Start = Callable[..., Done]


class Row(NamedTuple):
    """A layout. speed: of products beside its steps, by those of the machine's file."""

    layout: str
    measured_s: float
    predicted_s: float
    speed: float


def on_hosts(pair: Hosts, ranks: int, *command: str, timeout: float) -> Done:
    """Run a command on two hosts, half of its ranks on each."""
    return mpirun(0, *pair.mpirun(ranks // 2, *command), env={"UCX_TLS": "tcp,self"}, timeout=timeout)


def measured_machine(path: Path, ranks: int, start: Start) -> Path:
    """Measure this machine, three times if it is disturbed, and print what was found."""
    for _ in range(3):
        path.unlink(missing_ok=True)
        done = start(ranks, MPITRAIN, "bench", "machine", "--out", str(path), timeout=300)
        print(tail(done.output))
        if done.returncode == 0:
            return path
    sys.exit("the machine can't be measured: see above")


def swept(
    folder: Path, ranks: int, layouts: tuple[str, ...], machine: Path, given: argparse.Namespace, start: Start
) -> list[Row]:
    """Return what was measured and predicted of all layouts of so many ranks."""
    rows = folder / f"{ranks}.csv"
    settings = [f"{key}={value}" for key, value in MODEL.items()] + given.set
    words = [word for each in settings for word in ("--set", each)]
    words += [word for layout in layouts for word in ("--layout", layout)]
    words += ["--machine", str(machine), "--steps", str(given.steps), "--out", str(rows)]
    done = start(ranks, MPITRAIN, "sweep", *words, timeout=1200)
    print(tail(done.output), flush=True)
    with rows.open() as file:
        return [
            Row(f"{ranks} ranks: {row['layout']}", *(float(row[column]) for column in COLUMNS))
            for row in csv.DictReader(file)
            if all(row[column] for column in COLUMNS)
        ]


def summary(rows: list[Row]) -> str:
    """Return how far predictions are off."""
    off = sorted(((abs(row.measured_s / row.predicted_s - 1), row.layout) for row in rows), reverse=True)
    places = [_places([row[column] for row in rows]) for column in (1, 2)]
    correlation = statistics.correlation(*places) if len(rows) > 1 else 1.0
    worst = ", ".join(f"{share:.1%} ({layout})" for share, layout in off[:3])
    middle = statistics.median(share for share, _ in off)
    return (
        f"{len(rows)} layouts: |measured / predicted - 1| {middle:.1%} in the median, at worst {worst}; rank "
        f"correlation {correlation:.3f}"
    )


def _places(values: list[float]) -> list[int]:
    """Return which place each value has among them (Spearman)."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(place) for place in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__ % MEASURED, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="that measure the machine")
    parser.add_argument("--only", type=int, action="append", choices=LAYOUTS, help="layouts of so many ranks")
    parser.add_argument("--hosts", metavar="RATE", help="two hosts with a cable of this rate between them")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    layouts = OVER_HOSTS if given.hosts else LAYOUTS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start: Start = mpirun
        if given.hosts:
            start = partial(on_hosts, stack.enter_context(two_hosts(folder, given.hosts)))
        machine = given.machine or measured_machine(folder / "before.toml", given.ranks, start)
        rows = [
            row
            for ranks in layouts
            if not given.only or ranks in given.only
            for row in swept(folder, ranks, layouts[ranks], machine, given, start)
        ]
        print(summary(rows))
        slow, fast = (each(row.speed for row in rows) for each in (min, max))
        print(f"products beside the steps: {slow:.0%} to {fast:.0%} of the file's rate; by that rate:")
        print(summary([row._replace(measured_s=row.measured_s * row.speed) for row in rows]))


if __name__ == "__main__":
    main()
