"""Runs of mpitrain on text of which some batches are noise.

Commands as tests/support/command_sequence.py takes them, batches from NOISE in the environment.

    mpirun -n 2 python loss_spikes.py FOLDER '[["run", ...], ...]'

OVERFLOW in the environment is a step whose gradients are not finite when it comes first.
"""

import json
import math
import os
import sys
from pathlib import Path

import command_sequence
import numpy as np

from mpitrain.actor.actor import Actor
from mpitrain.data.order import Sampler
from mpitrain.data.token_rows import TokenRows

BATCH = 8  # sequences, as in launch.TINY


def main() -> None:
    """Turn sequences of the noisy batches of the training text into random tokens, the same every time."""
    noisy = set(json.loads(os.environ["NOISE"]))
    rows = Sampler.rows

    def spiked(sampler: Sampler, slots) -> TokenRows:
        found = rows(sampler, slots)
        tokens = found.tokens.copy()
        for row, slot in enumerate(slots):
            if sampler.is_shuffled and slot // BATCH in noisy:
                tokens[row] = np.random.default_rng(slot).integers(128, 256, tokens.shape[1])
        return found._replace(tokens=tokens)

    Sampler.rows = spiked
    if "OVERFLOW" in os.environ:
        _overflow(int(os.environ["OVERFLOW"]))


def _overflow(at: int) -> None:
    """Have the gradients of a step look infinite, once."""
    run_step = Actor.run_step
    due = {at}

    def overflowing(actor: Actor, step: int, *given, **more):
        measure = actor.measure
        squares = actor.measure.squares
        if step in due:
            due.remove(step)
            measure.squares = lambda grads: [math.inf]
        try:
            return run_step(actor, step, *given, **more)
        finally:
            measure.squares = squares

    Actor.run_step = overflowing


if __name__ == "__main__":
    main()
    command_sequence.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
