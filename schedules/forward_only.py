"""Evaluation: forwards, and nothing else."""

from mpitrain.schedules.actions import Action, F


def forward_only(num_stages: int, num_microbatches: int, stage: int) -> list[Action]:
    """Compute order of one stage in evaluation, the same on every stage. For 4 microbatches:

    each stage:  F0 F1 F2 F3
    """
    return [F(m, stage) for m in range(num_microbatches)]
