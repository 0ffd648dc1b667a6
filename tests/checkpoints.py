"""What the tests of checkpoints share."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from mpitrain.checkpoint.load import open_step


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
