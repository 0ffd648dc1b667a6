"""What loggers cost rank 0 in a step: python benchmarks/loggers.py RUN tensorboard csv wandb mlflow

RUN: the directory of a run that has ended. Its loggers follow it for some seconds, while this
process does what rank 0 does after each step.
"""

import statistics
import sys
import time

from mpitrain.cluster.rundir import RunDir
from mpitrain.report.loggers.logger_children import Loggers

STEPS = 2000


def main() -> None:
    loggers = Loggers(RunDir(sys.argv[1]), sys.argv[2:], [])
    times = []
    for _ in range(STEPS):
        begin_s = time.perf_counter()
        words = loggers.advance()
        times.append(time.perf_counter() - begin_s)
        print(words, end="")
        time.sleep(0.01)
    print(f"first step {times[0] * 1e3:.2f} ms; then {statistics.mean(times[1:]) * 1e3:.4f} ms a step")
    begin_s = time.perf_counter()
    print(loggers.end() or "all has been logged", f"{time.perf_counter() - begin_s:.1f} s after the end")


if __name__ == "__main__":
    main()
