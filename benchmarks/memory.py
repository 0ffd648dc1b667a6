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

MEASURED = """2026-11-26, AMD EPYC with AVX-512, two cores, torch 2.13.0, MPICH 5.0.2, 3 steps, MB of rank 0:

                             ranks  predicted   measured  ratio     bare
    quickstart                       1       67.4       57.7   0.86    179.3
    large, 1 microbatch              1     1729.2     1742.0   1.01    179.3
    large, 16 microbatches           1     1262.3     1264.9   1.00    179.4
    large, full recomputation        1     1212.2     1256.1   1.04    179.3
    large, bf16                      1     1542.3     1585.6   1.03    179.4
    dp=2 zero=1                      2      326.6      328.7   1.01    182.0
    dp=2 zero=3                      2      301.1      301.0   1.00    182.1
    dp=4 zero=2                      4      237.9      239.1   1.01    182.3
    dp=8 zero=3 bf16                 8      134.2      138.3   1.03    182.5
    pp=2 gpipe                       2      482.7      453.0   0.94    182.2
    pp=4 v-half                      4      172.4      181.5   1.05    182.3
    tp=2                             2      368.8      404.6   1.10    182.1
    cp=2                             2      399.2      395.7   0.99    182.0
    mixtral                          1      521.0      505.4   0.97    179.3
    mixtral ep=4                     4      326.7      264.9   0.81    182.3
    mixtral etp=4                    4      175.1      175.0   1.00    182.5

Beside 20 other processes:

    tp=2                             2      368.8      399.3   1.08    181.1
    pp=4 v-half                      4      172.4      186.2   1.08    181.4
    dp=8 zero=3 bf16                 8      134.2      139.1   1.04    181.4
    quickstart                       1       67.4       57.9   0.86    178.2

    experts, 20 steps                    200 steps
    mixtral             508.9  (0.98)        522.4  (1.00)
    ep=4                307.0  (0.94)        297.4  (0.91)
    etp=4               188.1  (1.07)        192.6  (1.10)

Holes are the rest: with MALLOC_MMAP_THRESHOLD_=131072, where no tensor is in the heap, what is measured is
1.03 (tp=2), 1.05 (v-half) and 1.06 (dp=8) times the prediction without their row.
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
