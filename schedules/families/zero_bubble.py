"""ZB-H1 and ZB-H2 (arXiv:2401.10241): split the backward, and fill 1F1B's bubbles with W.

The paper writes B for our I. Backwards for weights are late by more the later the rank: a rank near
the end has its I early, and puts off its W until the others have theirs, so that their I isn't kept
waiting.
"""

from collections import deque

from mpitrain.schedules.actions import Action, F, I, W
from mpitrain.schedules.families.one_f_one_b import ONE_F_ONE_B, alternate
from mpitrain.schedules.family import stage_per_rank


def zb_h1(num_stages: int, num_microbatches: int, stage: int) -> list[Action]:
    """Compute order of one stage under ZB-H1 (arXiv:2401.10241 section 2.1). For 3 stages, 5 microbatches:

    stage 0:  F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    stage 1:  F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    stage 2:  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    As many microbatches are in flight on every stage as on the first stage of 1F1B, and with W <= F
    <= I the bubble is (num_stages - 1) (F + I - W), a third of 1F1B's if all three take the same
    time.
    """
    return _split(num_microbatches, stage, warmup=num_stages - 1 - stage, lag=stage)


# arXiv:2401.10241, table 1
ZB_H1 = stage_per_rank(zb_h1, "zb-h1", held="bounded")._replace(
    aliases=("zb-1p",), bubble=1 / 3, no_more_than=(ONE_F_ONE_B,)
)


def zb_h2(num_stages: int, num_microbatches: int, stage: int) -> list[Action]:
    """Compute order of one stage under ZB-H2 (arXiv:2401.10241 section 2.2). For 3 stages, 7 microbatches:

    stage 0:  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 F6 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6
    stage 1:  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 F6 I4 W2 I5 W3 I6 W4 W5 W6
    stage 2:  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 F6 I6 W2 W3 W4 W5 W6

    With equal times no stage waits between its first and its last action, at the price of 2
    num_stages - 1 microbatches in flight. But the stages don't end together: a step that ends for
    all at once takes as long as with ZB-H1.
    """
    return _split(num_microbatches, stage, warmup=2 * (num_stages - 1 - stage), lag=2 * stage)


ZB_H2 = stage_per_rank(zb_h2, "zb-h2", held="bounded")._replace(aliases=("zb-2p",), bubble=0.0, stashes=2.0)


def _split(num_microbatches: int, stage: int, warmup: int, lag: int) -> list[Action]:
    forwards = [F(m, stage) for m in range(num_microbatches)]
    inputs = [I(m, stage) for m in range(num_microbatches)]
    return with_weights(alternate(forwards, inputs, warmup), lag)


def with_weights(order: list[Action], lag: int) -> list[Action]:
    """Put after each I the W of the I that stands `lag` before it, and what is left at the end."""
    result: list[Action] = []
    late: deque[Action] = deque()
    for action in order:
        result.append(action)
        if action.kind == "I":
            late.append(W(action.index, action.stage))
            if len(late) > lag:
                result.append(late.popleft())
    return result + list(late)
