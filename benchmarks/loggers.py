"""What loggers cost a run.

    python benchmarks/loggers.py [--runs 3] [--steps 600] tensorboard csv wandb mlflow

Runs of a tiny model on one rank, without and with loggers in turns. A step's time is from one line
of metrics.jsonl to the next, so it has all that rank 0 does between two steps. Then rank 0's calls
alone: the loggers follow the last run again, while this process does what rank 0 does after each step.
At last the share of a core that a logger takes from a rank that needs it: where others use the
machine, too, runs differ by more than loggers cost.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpitrain.cluster.rundir import RunDir
from mpitrain.comm.base.interpreter import python
from mpitrain.report.loggers.logger_children import Loggers
from mpitrain.report.loggers.logger_process import NICENESS

CALLS = 2000
CONTENDED_S = 10.0
MODEL = ["model.layers=2", "model.width=64", "model.heads=2", "model.ffn=128", "data.source=text",
         "data.sequence=64", "batch.global=8", "batch.micro=8"]  # fmt: skip


def run(folder: Path, steps: int, loggers: list[str]) -> list[dict]:
    """Return a run's lines of metrics.jsonl, those of its steps."""
    text = folder.parent / "text.txt"
    text.write_text("A step is one update of the weights. " * 2000)
    given = [*MODEL, f"run.dir={folder}", f"data.path={text}", f"run.steps={steps}"]
    given += ["run.save_every=0", f"run.loggers={json.dumps(loggers)}"]
    words = [word for key in given for word in ("--set", key)]
    command = ["mpirun", "-n", "1", *python("-m", "mpitrain", "run"), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def step_times_ms(lines: list[dict]) -> list[float]:
    """Return the times between lines: first that of the step after which loggers start."""
    return [1e3 * (line["time"] - before["time"]) for before, line in zip(lines, lines[1:])]


def compare_runs(folder: Path, args: argparse.Namespace) -> Path:
    """Print a step's time without loggers and with them; return the last run."""
    times: dict[bool, list[float]] = {False: [], True: []}
    first = []
    for number in range(args.runs):
        for on in (False, True):
            last = folder / f"{number}-{on}"
            steps = step_times_ms(run(last, args.steps, args.loggers if on else []))
            first += steps[:1] if on else []
            half = steps[len(steps) // 2 :]  # the libraries are loaded by then
            times[on] += half
            half_ms = statistics.median(half)
            print(f"run {number}, loggers {on}: {half_ms:.3f} ms a step in its second half")
    more = statistics.median(times[True]) - statistics.median(times[False])
    print(f"with loggers a step takes {more:+.3f} ms; the one that starts them {max(first):.1f} ms")
    return last


def rank_0(run_dir: Path, names: list[str]) -> None:
    """Print what rank 0 does for loggers."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before_s = used.ru_utime + used.ru_stime
    loggers = Loggers(RunDir(run_dir), names, [])
    times = []
    for _ in range(CALLS):
        begin_s = time.perf_counter()
        words = loggers.advance()
        times.append(1e3 * (time.perf_counter() - begin_s))
        print(words, end="")
        time.sleep(0.01)
    rest = sorted(times[1:])
    print(f"rank 0's calls: first step {times[0]:.2f} ms; then {statistics.mean(rest):.4f} ms a step, "
          f"99 of 100 below {rest[len(rest) * 99 // 100]:.3f}, longest {rest[-1]:.2f}")  # fmt: skip
    begin_s = time.perf_counter()
    print(loggers.end() or "all has been logged", f"{time.perf_counter() - begin_s:.1f} s after the end")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"their processes had {used.ru_utime + used.ru_stime - before_s:.1f} s of a core")


def share_of_core() -> None:
    """Print what a process like a logger's gets of a core that this one needs."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    script = f"import os; os.nice({NICENESS}); print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-S", "-c", script]
    busy = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
    busy.stdout.readline()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before_s, begin_s = used.ru_utime + used.ru_stime, time.process_time()
    end_s = time.monotonic() + CONTENDED_S
    while time.monotonic() < end_s:
        pass
    rank_s = time.process_time() - begin_s
    busy.kill()
    busy.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    logger_s = used.ru_utime + used.ru_stime - before_s
    print(f"of a core that rank 0 needs, a logger gets {100 * logger_s / (rank_s + logger_s):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("loggers", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rank_0(compare_runs(Path(folder), args), args.loggers)
    share_of_core()


if __name__ == "__main__":
    main()
