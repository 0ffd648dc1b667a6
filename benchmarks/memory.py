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

MEASURED = """Three steps on an AMD EPYC with AVX-512 (2026-11-26; ep=4: 20 steps), six on an Intel Xeon with
AMX (2026-11-27), two cores each, torch 2.13.0, MPICH 5.0.2, growth in MB of rank 0:

                               ranks  predicted      EPYC  ratio      Xeon  ratio
    quickstart                     1       59.4      57.7   0.97      52.6   0.88
    quickstart bf16                1       69.6         -      -      64.8   0.93
    large, 1 microbatch            1     1721.2    1742.0   1.01    1704.4   0.99
    large, 16 microbatches         1     1254.3    1264.9   1.01    1249.3   1.00
    large, full recomputation      1     1246.4    1256.1   1.01    1257.0   1.01
    large, bf16                    1     1614.4    1585.6   0.98    1591.4   0.99
    dp=2 zero=1                    2      318.7     328.7   1.03     318.8   1.00
    dp=2 zero=3                    2      293.3     301.0   1.03     290.5   0.99
    dp=4 zero=2                    4      229.6     239.1   1.04     227.9   0.99
    dp=8 zero=3 bf16               8      145.3     138.3   0.95     145.2   1.00
    pp=2 gpipe                     2      474.7     453.0   0.95     443.1   0.93
    pp=4 v-half                    4      164.4     181.5   1.10     171.5   1.04
    tp=2                           2      393.9     404.6   1.03     386.7   0.98
    tp=2 selective                 2      375.0         -      -     371.2   0.99
    tp=2 full recomputation        2      255.4         -      -     263.0   1.03
    tp=2 pp=2 bf16                 4      191.6         -      -     187.1   0.98
    cp=2                           2      391.4     395.7   1.01     387.6   0.99
    mixtral                        1      513.0     505.4   0.99     519.8   1.01
    mixtral bf16                   1      570.4         -      -     581.1   1.02
    mixtral pp=2 bf16              2      312.2         -      -     335.0   1.07
    mixtral ep=4                   4      318.8     306.0   0.96     314.6   0.99
    mixtral ep=4 bf16              4      344.2         -      -     371.8   1.08
    mixtral etp=4                  4      181.3     175.0   0.97     180.7   1.00

The prediction of etp=4 is of 2026-11-29, since when rows on their way to experts are counted.
After three steps ep=4 had 264.9 on the EPYC: it meets more tokens with each.
Beside 20 other processes on the EPYC: 399.3 (tp=2), 186.2 (v-half), 139.1 (dp=8), 57.9 (quickstart).

On an AMD of Zen 3, which multiplies bf16 in fp32 (2026-11-28, six steps), measured over predicted:
quickstart bf16 0.85, large 1.00, dp=8 zero=3 0.98, tp=2 pp=2 0.96, mixtral 1.03, pp=2 1.02, ep=4 0.93.
With --set model.vocab=16384 and three steps large, bf16 was 0.99; 1.07 before tiles of 4 MB were widened.

Experts after more steps, each a prediction's multiple; 20 and 200 steps on the EPYC, 20 and 200 on the Xeon:

    mixtral       0.99   1.02      -   1.03
    ep=4          0.96   0.93      -   0.94
    etp=4         1.07   1.09      -   1.07
    bf16             -      -   1.03   1.04
    pp=2 bf16        -      -   1.07   1.10
    ep=4 bf16        -      -   1.07   1.10

Holes and kernels: with MALLOC_MMAP_THRESHOLD_=131072, where no tensor is in the heap and no hole, what
is measured on the Xeon is 0.96 to 1.10 times the prediction without holes, in 39 layouts. In 16 bits it
is 10 to 30 MB above that in 32, and with experts 34 to 75: oneDNN keeps a kernel of each shape.
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
    "quickstart bf16": (1, (BF16,)),
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
    "tp=2 selective": (2, (*SMALL, *batch(2, micro=4), "parallel.tp=2", "memory.recompute=selective")),
    "tp=2 full recomputation": (2, (*SMALL, *batch(2, micro=4), "parallel.tp=2", "memory.recompute=full")),
    "tp=2 pp=2 bf16": (4, (*SMALL, *batch(4, micro=2), "parallel.tp=2", "parallel.pp=2", BF16)),
    "cp=2": (2, (*SMALL, *batch(2, micro=4), "parallel.cp=2")),
    "mixtral": (1, (*MIXTRAL, *batch(2, micro=4))),
    "mixtral bf16": (1, (*MIXTRAL, *batch(2, micro=4), BF16)),
    "mixtral pp=2 bf16": (2, (*MIXTRAL, *batch(4, micro=2), "parallel.pp=2", BF16)),
    "mixtral ep=4": (4, (*MIXTRAL, *batch(1, 4, micro=4), "parallel.dp=4", "parallel.ep=4")),
    "mixtral ep=4 bf16": (4, (*MIXTRAL, *batch(1, 4, micro=4), "parallel.dp=4", "parallel.ep=4", BF16)),
    "mixtral etp=4": (4, (*MIXTRAL, *batch(2, micro=4), "parallel.tp=4", "parallel.etp=4")),
}


class MemoryRow(NamedTuple):
    """Bytes of 10**6: growth predicted and measured, and what there was before."""

    predicted: float
    measured: float
    bare: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def read(output: str) -> MemoryRow:
    """Read the table at the end of a run."""
    last = {
        line.split("(")[0].strip().rsplit("  ", 1)[0].strip(): line.split()[-2:]
        for line in output.splitlines()
    }
    library = next(numbers for name, numbers in last.items() if name.startswith("library"))
    most = next(numbers for name, numbers in last.items() if name.startswith("peak resident"))
    predicted, measured = (
        float(a.replace(",", "")) - float(b.replace(",", "")) for a, b in zip(most, library)
    )
    return MemoryRow(predicted, measured, float(library[1].replace(",", "")))


def run(ranks: int, settings: tuple[str, ...], steps: int, show: bool) -> MemoryRow:
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
