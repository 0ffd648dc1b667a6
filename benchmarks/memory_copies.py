"""What copies in memory (recovery.every) cost a step: neighbouring steps of one run, with and without.

    python benchmarks/memory_copies.py [--ranks 2] [--steps 160] [SETTING ...]  for example: parallel.zero=3

A copy is made after every fourth step. What it costs lies in that step and in the next one, whose caches
it has emptied and under which it travels to a partner; the two steps after these have none of it. So each
four steps give one difference of neighbours, and a machine that becomes slower or faster changes both.

    wall    seconds of the clock, of the slowest rank
    core    seconds of processor time, of all threads of all ranks: other processes change it only through
            caches and memory

Printed is what a copy adds, the median of the differences, with the interval that holds it in 90 of 100
draws from the differences (bootstrap), and its share of the median of a step without. What it adds doesn't
depend on the batch, and noise does: with batch.global=2 fewer steps tell.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import STOPPED_EARLY

EVERY = 4
DRAWS = 2000
SETTINGS = ["model.preset=reference", "data.sequence=256", "batch.global=8", "batch.micro=1",
            "parallel.dp=2", "parallel.zero=1", "run.save_every=0", "run.eval_every=0"]  # fmt: skip


def measure(folder: Path, settings: list[str]) -> None:
    """Train, and write the wall and the processor seconds of each step of this rank, its copy included."""
    from mpitrain import api

    with api.open_run(None, *settings, f"recovery.every={EVERY}", f"run.dir={folder / 'run'}") as run:
        times = []
        before = time.perf_counter(), time.process_time()
        for _ in run.steps():
            now = time.perf_counter(), time.process_time()
            times.append((now[0] - before[0], now[1] - before[1]))
            before = now
        (folder / f"rank-{run.rank}.json").write_text(json.dumps(times))


def neighbours(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Return the seconds of the two steps that a copy changes, and of the two after them, in turns.

    seconds: of all steps; the first copy makes its pages, and the last step is saved on disk.
    """
    begins = range(2 * EVERY - 1, len(seconds) - EVERY, EVERY)
    return [(sum(seconds[at : at + 2]), sum(seconds[at + 2 : at + 4])) for at in begins]


def added_s(found: Sequence[tuple[float, float]]) -> float:
    """Return what a copy adds."""
    return statistics.median(with_copy - without for with_copy, without in found)


def describe(name: str, seconds: Sequence[float]) -> str:
    found = neighbours(seconds)
    dice = random.Random(0)
    drawn = sorted(added_s(dice.choices(found, k=len(found))) for _ in range(DRAWS))
    step_s = statistics.median(without for _, without in found) / 2
    low, high = drawn[DRAWS // 20], drawn[-DRAWS // 20]
    return (f"{name}: a copy adds {1e3 * added_s(found):.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}), "
            f"{added_s(found) / step_s:.2%} of {1e3 * step_s:,.0f} ms; {len(found)} differences")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--folder", help="of the ranks that this program starts")
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    settings = [*SETTINGS, f"run.steps={args.steps}", *args.settings]
    if args.folder:
        measure(Path(args.folder), settings)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["mpirun", "-n", str(args.ranks), sys.executable, *sys.argv, "--folder", folder]
        code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
        if code not in (0, STOPPED_EARLY):  # a run.time_limit is as good as a number of steps
            sys.exit(code)
        of_ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    for number, (name, of_step) in enumerate({"wall": max, "core": sum}.items()):
        print(describe(name, [of_step(times[number] for times in step) for step in zip(*of_ranks)]))


if __name__ == "__main__":
    main()
