"""`mpitrain ckpt repair`: make the index of each step valid HDF5, which other programs open.

Arrays stay as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mpitrain.checkpoint.repair import format_fault, rewrite_index
from mpitrain.cluster.lock import Lock
from mpitrain.commands.ckpt.steps import CHECKPOINTS, steps_at
from mpitrain.commands.ckpt.verify import MOST_SHOWN
from mpitrain.errors import DONE, FAILED, CheckpointError
from mpitrain.inputs import listed


def repair(given: str, step: int | None, say: Callable[[str], None]) -> int:
    """Repair a step, or all; say what was done; return 0, or 1 if a step has another damage.

    Raises CheckpointError if a run is there.
    """
    steps = steps_at(given, step)
    valid = list[int]()
    damaged = list[str]()
    with _without_a_run(steps.folder, say):
        for each in steps.committed:
            try:
                path = steps.path(each)
                if fault := format_fault(path):
                    rewrite_index(path)
                    say(
                        f"step {each}: index.h5 was no valid HDF5 ({fault}); it was written anew, with the "
                        "same root digest"
                    )
                else:
                    valid.append(each)
            except CheckpointError as error:
                damaged.append(error.args[0])
    if valid:
        say(f"nothing to repair in step {listed(valid)}")
    for line in damaged[:MOST_SHOWN]:
        say(line)
    if len(damaged) > MOST_SHOWN:
        say(f"... and {len(damaged) - MOST_SHOWN:,} more that are damaged")
    return FAILED if damaged else DONE


@contextmanager
def _without_a_run(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep runs out of the run directory that a folder of checkpoints belongs to.

    Raises CheckpointError if one is there.
    """
    run = folder.absolute().parent
    if folder.absolute().name != CHECKPOINTS or not (run / "config.toml").exists():
        yield  # a folder that `mpitrain ckpt reshard` wrote
        return
    lock = Lock(run, lost=say)
    if said := lock.take(say):
        say(said)
    try:
        yield
    finally:
        lock.release()
