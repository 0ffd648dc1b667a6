"""Seq1F1B: 1F1B of segments of sequences rather than of whole microbatches (arXiv:2406.03488)."""

from mpitrain.schedules.actions import Action, B, F
from mpitrain.schedules.families.one_f_one_b import ONE_F_ONE_B, alternate
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.options import Options

SEGMENTS = 2  # of a sequence, if the user doesn't say


def seq1f1b(num_ranks: int, num_microbatches: int, options: Options) -> list[list[Action]]:
    """Compute order of every rank under Seq1F1B. For 3 ranks, 2 microbatches of 2 segments, where
    F3 is segment 1 of microbatch 1:

    rank 0:  F0 F1 F2 F3 B1 B0 B3 B2
    rank 1:  F0 F1 F2 B1 F3 B0 B3 B2
    rank 2:  F0 F1 B1 F2 B0 F3 B3 B2

    Later segments attend to earlier ones, so a microbatch's segments go forward ascending and come
    back descending. The bubble is 1F1B's divided by the number of segments k if all of them take
    the same time, and (p + k - 1) / k microbatches are in flight.
    """
    segments = options.segments or SEGMENTS
    rows = []
    for stage in range(num_ranks):
        forwards = [F(unit, stage) for unit in range(num_microbatches * segments)]
        backwards = [
            B(m * segments + segment, stage)
            for m in range(num_microbatches)
            for segment in reversed(range(segments))
        ]
        rows.append(alternate(forwards, backwards, warmup=num_ranks - stage - 2 + segments))
    return rows


SEQ1F1B = ScheduleFamily(
    seq1f1b, name="seq1f1b", takes=("segments",), held="bounded", less_than=(ONE_F_ONE_B,)
)
