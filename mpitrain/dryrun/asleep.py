"""How long a rank of a dry run sleeps for an instruction.

at a rate     model FLOPs of computations, divided evenly over tp, cp and parts
on a machine  as is predicted (asleep_on_machine.py)
"""

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.plan.plan import Plan
from mpitrain.schedules.actions import COMPUTE, Action

SHARES = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3, "R": 1 / 3}  # of the FLOPs of a training step


class Asleep(NamedTuple):
    """How long each instruction takes, and by what that is known."""

    seconds: Callable[[Action], float]
    words: str


AWAKE = Asleep(lambda action: 0.0, "nothing is computed")


def at_rate(plan: Plan, tflops: float) -> Asleep:
    """Return how long a rank computes for an instruction that computes so many TFLOP/s."""
    config = plan.config
    table = plan.table
    tokens = config.batch.micro * config.data.sequence / table.segments

    def seconds_of_stage(number: int) -> float:
        layers = [placed.layer for block in plan.stage(number).blocks for placed in block]
        flops = sum(layer.flops(config.data.sequence) for layer in layers) * tokens
        return flops / (config.parallel.tp * config.parallel.cp) / (tflops * 1e12)

    whole = [seconds_of_stage(number) for number in range(table.num_stages)]

    def seconds(action: Action) -> float:
        if action.kind not in COMPUTE:
            return 0.0
        return whole[action.stage] * SHARES[action.kind] / num_parts(plan, action)

    return Asleep(seconds, f"asleep for what {tflops:g} TFLOP/s would compute")


def num_parts(plan: Plan, action: Action) -> int:
    """Return among how many parts of its stage a computation is divided."""
    return 1 if action.part is None else len(plan.stage(action.stage).parts)
