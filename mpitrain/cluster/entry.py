"""What a process does first, and how it reports an error, whether it came by the command line or a script."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from mpitrain.comm.base import launchers
from mpitrain.errors import MpitrainError
from mpitrain.inputs import printable
from mpitrain.plan.declared.screen import columns, folded

LIBRARIES = {  # what they read from the environment when they load
    # one document at a time: threads would have nothing to do, and forks are warned of
    "TOKENIZERS_PARALLELISM": "false",
    "OMPI_MCA_osc": "^ucx",  # of Open MPI's wheel: an error for each window of shared memory
}
PATIENCE_S = 5  # of ranks that have nothing to show


def settle_libraries() -> None:
    """Set what libraries read from the environment when they load, unless the user has."""
    for name, value in LIBRARIES.items():
        os.environ.setdefault(name, value)


@contextmanager
def loading() -> Iterator[None]:
    """Load modules without garbage collection; what there is then is never looked through again.

    For torch's half a million objects that took 0.4 of the 2.6 s of one rank and step (Intel Xeon,
    2026-11-27).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def on_first_rank(show: Callable[[], None], code: int) -> int:
    """Show an error on the first rank only, if the launcher says which one it is; return the exit code.

    Before MPI connects them, others give it time: Open MPI ends a job with the first that fails.
    """
    launch = launchers.launch()
    copy = launchers.torchrun()
    if (launch is None or launch.rank == 0) and (copy is None or copy[0] == 0):
        show()
    elif launch is not None and launch.name == launchers.OPEN_MPI and "mpi4py.MPI" not in sys.modules:
        time.sleep(PATIENCE_S)
    return code


def report_error(error: MpitrainError) -> None:
    """Print an error that all ranks have, once."""
    on_first_rank(partial(warn, str(error)), error.exit_code)


def warn(text: str) -> None:
    """Print lines on standard error, laid out for its terminal."""
    print(folded(printable(text), columns(sys.stderr)), file=sys.stderr, flush=True)
