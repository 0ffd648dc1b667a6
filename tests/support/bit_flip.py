"""A run of mpitrain in which one rank's memory errs once: PLAN says where.

    mpirun -n 4 python bit_flip.py '{"rank": 1, "step": 3, "what": "weight"}' run --set ...

weight: before the forwards of that step a bit of a weight flips.
gradient: a bit of a gradient, once it is computed, before it is reduced; in the first pass of that
step. With NOISE in the environment batches are noise, too, as tests/support/loss_spikes.py says.
"""

import json
import os
import sys

import loss_spikes
import torch

from mpitrain import cli
from mpitrain.actor.actor import Actor
from mpitrain.actor.reductions import Gradients
from mpitrain.actor.step_work import Work
from mpitrain.schedules.actions import Action


def flip(x: torch.Tensor) -> None:
    """Flip bit 20 of the first number."""
    bits = x.detach().flatten()[:1].view(torch.int32)
    bits ^= 1 << 20
    sys.stderr.write("flipped a bit\n")


def main(plan: dict) -> None:
    """Plant the error, and run mpitrain."""
    if (
        int(next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ))
        == plan["rank"]
    ):
        run_step = Actor.run_step
        reduce = Gradients.reduce
        due = []

        def stepped(actor: Actor, step: int, *given, **more):
            if step == plan["step"] and plan["what"] == "weight":
                flip(actor.gradients.pieces[0].weight)
            elif step == plan["step"]:
                due.append(step)
            return run_step(actor, step, *given, **more)

        def reduced(gradients: Gradients, action: Action, work: Work) -> None:
            if due:
                due.clear()
                flip(gradients.stages[action.stage].buckets[action.index].gradients[0].whole)
            reduce(gradients, action, work)

        Actor.run_step = stepped
        Gradients.reduce = reduced
    if "NOISE" in os.environ:
        loss_spikes.main()
    cli.main()


if __name__ == "__main__":
    given = sys.argv[1]
    sys.argv[1:] = sys.argv[2:]
    main(json.loads(given))
