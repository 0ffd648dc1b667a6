"""Predicted and measured growth of resident memory over a process without a model, of several layouts.

    python benchmarks/memory.py [--only PART_OF_A_NAME]... [--steps 6] [--set KEY=VALUE]...

Each row is a run; its numbers are those of its own table of rank 0 (`memory of rank 0, MB`). Growth
is the most that was resident and that no file backs, pages of shared memory once a node, less what
there was before the model.

%s
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import NamedTuple

MEASURED = """Three steps on an AMD EPYC with AVX-512 (2026-11-26), six on an Intel Xeon with AMX
(2026-11-27), two cores each, torch 2.13.0, MPICH 5.0.2, growth in MB of rank 0,
predicted as on the second day:

                               ranks  predicted      EPYC  ratio      Xeon  ratio
    quickstart                     1       59.4      57.7   0.97      51.3   0.86
    large, 1 microbatch            1     1721.2    1742.0   1.01    1712.6   1.00
    large, 16 microbatches         1     1254.3    1264.9   1.01    1249.2   1.00
    large, full recomputation      1     1204.2    1256.1   1.04    1262.6   1.05
    large, bf16                    1     1534.3    1585.6   1.03    1590.0   1.04
    dp=2 zero=1                    2      318.6     328.7   1.03     318.2   1.00
    dp=2 zero=3                    2      293.1     301.0   1.03     290.6   0.99
    dp=4 zero=2                    4      229.6     239.1   1.04     228.5   1.00
    dp=8 zero=3 bf16               8      126.2     138.3   1.10     140.3   1.11
    pp=2 gpipe                     2      474.7     453.0   0.95     439.1   0.93
    pp=4 v-half                    4      164.4     181.5   1.10     172.0   1.05
    tp=2                           2      360.8     404.6   1.12     389.3   1.08
    cp=2                           2      391.2     395.7   1.01     387.3   0.99
    mixtral                        1      513.0     505.4   0.99     524.3   1.02
    mixtral ep=4                   4      318.7     264.9   0.83     297.2   0.93
    mixtral etp=4                  4      167.1     175.0   1.05     179.2   1.07

Beside 20 other processes on the EPYC: 399.3 (tp=2), 186.2 (v-half), 139.1 (dp=8), 57.9 (quickstart).

Experts after more steps, each a prediction's multiple; 20 and 200 steps on the EPYC, 200 on the Xeon:

    mixtral    0.99   1.02   1.03
    ep=4       0.96   0.93   0.94
    etp=4      1.13   1.15   1.13

Holes are the rest: with MALLOC_MMAP_THRESHOLD_=131072, where no tensor is in the heap, what is measured on
the Xeon is 1.02 (tp=2), 1.02 (v-half) and 1.12 (dp=8) times the prediction without their row.
Where torch begins tensors of 2 MB and more at huge pages (THP_MEM_ALLOC_ENABLE=1), malloc leaves up to
2 MB before each: "large, 1 microbatch" was 1.22 then. It bought no speed: processor time of a step
without, of that with it, median of four pairs each: 8 blocks of width 384 1.02, 12 of width 512 1.04, 6 of
width 768 0.91 (single pairs 0.88 to 1.33).
"""
BIN = Path(sys.executable).parent
SMALL = (
    "model.layers=8",
    "model.width=384",
    "model.heads=6",
    "model.kv_heads=2",
    "model.ffn=1024",
    "data.sequence=256",
)
LARGE = (
    "model.layers=12",
    "model.width=512",
    "model.heads=8",
    "model.kv_heads=8",
    "model.ffn=1408",
    "data.sequence=256",
)
MIXTRAL = (
    "model.family=mixtral",
    "model.layers=4",
    "model.width=256",
    "model.ffn=512",
    "experts.count=8",
    "data.sequence=256",
)
BF16 = "precision.compute=bf16"


def batch(microbatches: int, dp: int = 1, micro: int = 1) -> tuple[str, str]:
    """Return the keys for so many microbatches on each data-parallel rank."""
    return f"batch.global={microbatches * dp * micro}", f"batch.micro={micro}"


CASES = {  # name: (ranks, settings)
    "quickstart": (1, ()),
    "large, 1 microbatch": (1, (*LARGE, *batch(1, micro=4))),
    "large, 16 microbatches": (1, (*LARGE, *batch(16))),
    "large, full recomputation": (1, (*LARGE, *batch(2, micro=4), "memory.recompute=full")),
    "large, bf16": (1, (*LARGE, *batch(2, micro=4), BF16)),
    "dp=2 zero=1": (2, (*SMALL, *batch(4, 2), "parallel.dp=2", "parallel.zero=1")),
    "dp=2 zero=3": (2, (*SMALL, *batch(4, 2), "parallel.dp=2", "parallel.zero=3")),
    "dp=4 zero=2": (4, (*SMALL, *batch(2, 4), "parallel.dp=4", "parallel.zero=2")),
    "dp=8 zero=3 bf16": (8, (*SMALL, *batch(2, 8), "parallel.dp=8", "parallel.zero=3", BF16)),
    "pp=2 gpipe": (2, (*SMALL, *batch(8), "parallel.pp=2", "pipeline.schedule=gpipe")),
    "pp=4 v-half": (4, (*SMALL, *batch(8), "parallel.pp=4", "pipeline.schedule=v-half")),
    "tp=2": (2, (*SMALL, *batch(2, micro=4), "parallel.tp=2")),
    "cp=2": (2, (*SMALL, *batch(2, micro=4), "parallel.cp=2")),
    "mixtral": (1, (*MIXTRAL, *batch(2, micro=4))),
    "mixtral ep=4": (4, (*MIXTRAL, *batch(1, 4, micro=4), "parallel.dp=4", "parallel.ep=4")),
    "mixtral etp=4": (4, (*MIXTRAL, *batch(2, micro=4), "parallel.tp=4", "parallel.etp=4")),
}


class Row(NamedTuple):
    """Bytes of 10**6: growth predicted and measured, and what there was before."""

    predicted: float
    measured: float
    bare: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def read(output: str) -> Row:
    """Read the table at the end of a run."""
    last = {
        line.split("(")[0].strip().rsplit("  ", 1)[0].strip(): line.split()[-2:]
        for line in output.splitlines()
    }
    library = next(numbers for name, numbers in last.items() if name.startswith("library"))
    most = next(numbers for name, numbers in last.items() if name.startswith("resident at most"))
    predicted, measured = (
        float(a.replace(",", "")) - float(b.replace(",", "")) for a, b in zip(most, library)
    )
    return Row(predicted, measured, float(library[1].replace(",", "")))


def run(ranks: int, settings: tuple[str, ...], steps: int, show: bool) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        every = (
            f"run.dir={folder}/run",
            f"run.steps={steps}",
            "run.eval_batches=1",
            "run.preflight=off",
            *settings,
        )
        launched = [str(BIN / "mpirun"), "-n", str(ranks)] if ranks > 1 else []
        command = [*launched, str(BIN / "mpitrain"), "run", *(f"--set={setting}" for setting in every)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    if show:
        print(done.stdout[done.stdout.index("memory of rank 0") :].split("done:")[0])
    return read(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__ % MEASURED, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="cases whose name has this in it; may be given several times",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="further settings of every run"
    )
    parser.add_argument("--rows", action="store_true", help="show each run's own table, too")
    arguments = parser.parse_args()
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, MB of rank 0"
    )
    print(f"{'':<28} ranks {'predicted':>10} {'measured':>10} {'ratio':>6} {'bare':>8}")
    for name, (ranks, settings) in CASES.items():
        if not arguments.only or any(part in name for part in arguments.only):
            row = run(ranks, (*settings, *arguments.settings), arguments.steps, arguments.rows)
            print(
                f"{name:<28} {ranks:>5} {row.predicted:>10.1f} {row.measured:>10.1f} {row.ratio:>6.2f} "
                f"{row.bare:>8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
