"""How many threads a rank computes with, and what is done where none can be started.

One unless asked for more: what a rank allocates is first touched by its own thread, so it lies in
the NUMA domain to which the launcher has bound the rank (mpirun --bind-to, srun --cpu-bind).

No torch, so that a wrong number is refused before all ranks load it.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mpitrain.config import MOST_THREADS, Run
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

VARIABLE = "OMP_NUM_THREADS"
T = TypeVar("T")


def num_threads(run: Run) -> int:
    """Return run.threads, else OMP_NUM_THREADS, else 1. Raises ConfigError.

    OpenMP's variable may list a number for each level of nesting, as in "4,2"; torch has one level.
    """
    if run.threads:
        return run.threads
    given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return 1
    numbers = [_number(word.strip()) for word in given.split(",")]
    if not all(1 <= number <= MOST_THREADS for number in numbers):
        raise ConfigError(
            f'{VARIABLE} = "{shown(given)}": needed a number of threads, 1 to {MOST_THREADS:,}; change or '
            "unset it, or set run.threads"
        )
    return numbers[0]


def submitted(pool: ThreadPoolExecutor, call: Callable[..., T], *given: object) -> Future[T]:
    """Have the one thread of a pool call something; where none can be started, call it at once."""
    try:
        return pool.submit(call, *given)
    except RuntimeError:
        pool.shutdown(cancel_futures=True)  # what was submitted is still in its queue
    done = Future[T]()
    try:
        done.set_result(call(*given))
    except Exception as error:
        done.set_exception(error)
    return done


def _number(word: str) -> int:
    """Return the number, or 0: isdecimal() takes all scripts' digits, int() not 4,300 of them."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else 0
