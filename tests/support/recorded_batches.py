"""Runs of mpitrain that write down every batch that a rank computes a step with.

Commands as tests/support/command_sequence.py takes them; BATCHES in the environment is the folder.

    mpirun -n 2 python recorded_batches.py FOLDER '[["run", ...], ...]'

BATCHES/STEP-RANK.npz has what the rank's microbatches hold, row after row: `tokens` on a first stage,
`targets` on a last one, and `documents`; `opens` is how often the rank has opened tokens or ends so far.
With context parallelism short documents are divided, too.
"""

import json
import os
import sys
from pathlib import Path

import command_sequence
import numpy as np
import torch

from mpitrain.actor.actor import Actor
from mpitrain.plan.division import sequence


def main() -> None:
    """Write a step's microbatches before the step runs."""
    sequence.LEAST_SHARE = 2
    run_step = Actor.run_step
    opens = []

    def opened(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith(("tokens.bin", "ends.bin")):
            opens.append(arguments[0])

    sys.addaudithook(opened)

    def recorded(actor: Actor, step: int, microbatches, *given, **more):
        columns = {"opens": len(opens)}
        for name in ("tokens", "targets", "documents"):
            parts = [getattr(microbatch, name) for microbatch in microbatches]
            if parts[0] is not None:
                columns[name] = torch.cat(parts).cpu().numpy()
        if len(columns) > 1:  # those of a rehearsal are empty
            np.savez(Path(os.environ["BATCHES"]) / f"{step}-{actor.mesh.rank}", **columns)
        return run_step(actor, step, microbatches, *given, **more)

    Actor.run_step = recorded


if __name__ == "__main__":
    main()
    command_sequence.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
