"""1F1B: alternate forwards and backwards as early as possible, so that few microbatches are in flight."""

from mpitrain.schedules.actions import Action, B, F
from mpitrain.schedules.families.gpipe import GPIPE
from mpitrain.schedules.family import stage_per_rank


def one_f_one_b(num_stages: int, num_microbatches: int, stage: int) -> list[Action]:
    """Compute order of one stage under 1F1B (PipeDream-Flush, arXiv:2006.09503; arXiv:2104.04473
    section 2.2.1).

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


ONE_F_ONE_B = stage_per_rank(one_f_one_b, "1f1b", held="bounded")._replace(
    less_than=(GPIPE,), proposed="always"
)


def eager_1f1b(num_stages: int, num_microbatches: int, stage: int) -> list[Action]:
    """Compute order of one stage under eager 1F1B (arXiv:2211.05322). For 4 stages, 8 microbatches:

    stage 0:  F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7
    stage 1:  F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7
    stage 2:  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
    stage 3:  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7

    A forward and a backward on each of two neighbours, and two messages, make a cycle. Under 1F1B a
    stage begins with one forward more than the next, and the cycle is two turns of F + B long:
    messages are waited for in every turn. Here a stage begins with two more, and the cycle is three
    turns long. As long as two messages take no longer than one F + B they are hidden, and the
    makespan is (m + p - 1) (F + B) + 2 (p-1) messages. The first stage holds 2p - 1 microbatches
    instead of p.
    """
    forwards = [F(m, stage) for m in range(num_microbatches)]
    backwards = [B(m, stage) for m in range(num_microbatches)]
    return alternate(forwards, backwards, warmup=2 * (num_stages - 1 - stage))


EAGER_1F1B = stage_per_rank(eager_1f1b, "eager-1f1b", held="bounded")


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Run `warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]
