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
    forwards = [F(m, stage) for m in range(num_microbatches)]
    backwards = [B(m, stage) for m in range(num_microbatches)]
    return alternate(forwards, backwards, warmup=num_stages - 1 - stage)


def eager_1f1b(num_stages: int, num_microbatches: int, stage: int) -> list[Action]:
    """Compute order of one stage under 1F1B with one more forward in the warmup. For 4 stages, 6 microbatches:

    stage 0:  F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5
    stage 1:  F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
    stage 2:  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    stage 3:  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Under 1F1B p microbatches are in flight on p stages, and each comes back to the first stage after p (F + B) and 2 (p-1)
    messages: every message is waited for. With p + 1 in flight messages are hidden as long as 2 (p-1) of them take no longer than
    one F + B; the makespan is then (m + p - 1) (F + B) + 2 (p-1) messages, however many microbatches there are. The last stage
    sends nobody forwards, and one more in flight gains it nothing.

    The idea is that of eager-1F1B (arXiv:2211.05322 section 4), which hides longer messages, up to half of F + B each, but
    holds 2p - 1 microbatches in flight.
    """
    extra = 1 if stage < num_stages - 1 else 0
    forwards = [F(m, stage) for m in range(num_microbatches)]
    backwards = [B(m, stage) for m in range(num_microbatches)]
    return alternate(forwards, backwards, warmup=num_stages - 1 - stage + extra)


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Run `warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]
