"""What the tests of checkpoints share."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from mpitrain.checkpoint.boxes import run_boxes
from mpitrain.checkpoint.load import open_step
from mpitrain.checkpoint.meta import StepInfo
from mpitrain.checkpoint.save import Extent, begin, commit, write_shard

ABOUT = StepInfo(
    '[model]\nlayers = 4\nfamily = "llama"\n',
    {"host": "node7", "user": "me", "layout": "pp(1) x dp(2)", "MPI": "an MPI"},
)


def meta_of(step: int) -> dict:
    """Return a meta as the trainer writes it."""
    return {
        "step": step,
        "tokens": 256 * step,
        "updates": step,
        "skipped": 0,
        "data": "0" * 32,
        "loss_scale": [1.0, 0],
    }


def digest_of(folder: Path, step: int) -> str:
    """Return the root digest that a step was committed with."""
    with open_step(folder, step) as checkpoint:
        return checkpoint.digest


def killed_at(event: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that kills itself at the n-th call that opens, makes, renames or removes.

    Return whether it got there.
    """
    child = os.fork()
    if child == 0:
        countdown = iter(range(event, -1, -1))
        calls = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
        sys.addaudithook(
            lambda name, _: name in calls and next(countdown) == 0 and os.kill(os.getpid(), signal.SIGKILL)
        )
        try:
            action()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def save(folder, step, arrays, num_writers=2, **meta):
    """Divide the elements of each array between writers, as ZeRO does."""
    tmp = begin(folder, step)
    for writer in range(num_writers):
        parts = {}
        for name, array in arrays.items():
            first, end = (array.size * n // num_writers for n in (writer, writer + 1))
            boxes = run_boxes(array.shape, first, end) if array.size else []
            held = [
                (array.reshape(-1)[first:end][at].reshape(box.shape), Extent(array.shape, box.start))
                for box, at in boxes
            ]
            parts |= {name: held} if held else {name: array} if not array.size and writer == 0 else {}
        write_shard(tmp, writer, parts)
    return commit(tmp, meta_of(step) | meta, num_writers, about=ABOUT)
