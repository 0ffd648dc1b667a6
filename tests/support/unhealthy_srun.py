"""Slurm's srun of an allocation with an unhealthy node, from the words that `mpitrain supervise` gives it.

    UNHEALTHY='{"node": "b", "rank": 1, "step": 6, "what": "weight"}' srun --nodelist=a,b mpitrain run ...

A rank a node by mpirun, with the node's name where Slurm has it. what: as bit_flip.py has it, or
"slow", which takes 0.3 s more for each step. PRELOADED: words that run a program with its libraries loaded.
"""

import json
import os
import sys
import time


def start(words: list[str], mpirun: str) -> None:
    """Replace this process by mpirun, or say that a node answers."""
    if words[-1] == "true":
        return
    nodes = next(word for word in words if word.startswith("--nodelist=")).split("=")[1].split(",")
    command = [word for word in words if not word.startswith("--n")]
    unhealthy, before = json.loads(os.environ["UNHEALTHY"])["node"], json.loads(os.environ["PRELOADED"])
    print(f"srun on {' '.join(nodes)}", flush=True)
    whole = [mpirun]
    for node in nodes:
        rank = [*(before or [sys.executable]), __file__, *command[1:]]
        rank = rank if node == unhealthy else [*before, *command]
        whole += [":"] * (len(whole) > 1) + ["-n", "1", "env", f"SLURMD_NODENAME={node}", *rank]
    os.execvp(mpirun, whole)


def slow() -> None:
    """Run mpitrain with slow steps."""
    from mpitrain import cli
    from mpitrain.actor.actor import Actor

    run_step = Actor.run_step

    def slowed(actor: Actor, *given, **more):
        time.sleep(0.3)
        return run_step(actor, *given, **more)

    Actor.run_step = slowed
    cli.main()


if __name__ == "__main__":
    if sys.argv[1].startswith("--"):
        start(sys.argv[1:], os.environ["MPIRUN_OF_TESTS"])
    elif (plan := json.loads(os.environ["UNHEALTHY"]))["what"] == "slow":
        slow()
    else:
        import bit_flip  # torch, which a node that answers doesn't load

        bit_flip.main(plan)
