"""1F1B: alternate forwards and backwards as early as possible, so that few microbatches are in flight."""

from mpitrain.schedules.actions import Action, B, F


def one_f_one_b(num_stages: int, num_microbatches: int, stage: int) -> list[Action]:
    """Compute order of one stage under 1F1B (PipeDream-Flush, arXiv:2006.09503; arXiv:2104.04473 section 2.2.1).

    For 4 stages, 6 microbatches:

    stage 0:  F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
    stage 1:  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    stage 2:  F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
    stage 3:  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    At most num_stages - stage microbatches are in flight. The makespan is GPipe's.
    """
    warmup = min(num_stages - 1 - stage, num_microbatches)
    order = [F(m, stage) for m in range(warmup)]
    for m in range(warmup, num_microbatches):
        order += [F(m, stage), B(m - warmup, stage)]
    return order + [B(m, stage) for m in range(num_microbatches - warmup, num_microbatches)]
