"""DualPipe and DualPipeV: two streams of microbatches meet; one's F runs with the other's B.

    DualPipe   p ranks, p stages, two copies of them: one goes down the ranks, one up
               (arXiv:2412.19437, section 3.2.1)
    DualPipeV  p ranks, 2p stages, one copy: the V of ZB-V, the first half of DualPipe
               (github.com/deepseek-ai/DualPipe)

A rank near the ends of DualPipe and its mirror image run the same eight phases; what differs is
which stream they meet first.
"""

from collections import deque

from mpitrain.errors import ScheduleError, counted
from mpitrain.schedules.actions import PAIR, Action, B, F, I, W
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.options import Options


def dualpipe(num_ranks: int, num_microbatches: int, _: Options) -> list[list[Action]]:
    """Compute order of every rank under DualPipe. For 2 ranks, 4 microbatches:

    rank 0:  F0@0 F0@3 F1@0 B0@3 PAIR F1@3 B0@0 B1@3 I1@0 W1@0
    rank 1:  F0@2 F0@1 F1@2 B0@1 PAIR F1@1 B0@2 B1@1 I1@2 W1@2

    Stages 0 to p-1 are the first copy, stage s on rank s; p to 2p-1 the second, stage p + s on rank
    p-1-s. Each copy has half the microbatches, and the last step is to add the gradients of the
    copies.
    """
    if num_ranks % 2:
        raise ScheduleError(
            f"dualpipe: found {counted(num_ranks, 'ranks')}, needed an even number; change "
            "parallel.pp, or use dualpipev"
        )
    if num_microbatches % 2 or num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe: found {counted(num_microbatches, 'microbatches')} on {num_ranks} ranks, "
            f"needed an even number, at least {2 * num_ranks}; raise batch.global, or use interleaved-zb or "
            "zbv, which run with fewer"
        )
    rows = []
    for rank in range(num_ranks):
        # the stages of the first and of the second copy
        first = rank
        second = 2 * num_ranks - 1 - rank
        if rank >= num_ranks // 2:
            first, second = second, first
        rows.append(
            _TwoStageRank(first, second).run(
                min(rank, num_ranks - 1 - rank), num_ranks // 2, num_microbatches // 2
            )
        )
    return rows


DUALPIPE = ScheduleFamily(dualpipe, name="dualpipe", copies=2, held="bounded", bubble=1 / 6)


def dualpipev(num_ranks: int, num_microbatches: int, _: Options) -> list[list[Action]]:
    """Compute order of every rank under DualPipeV. For 2 ranks, 4 microbatches:

    rank 0:  F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 PAIR F3@0 B1@3 PAIR F2@3 B0@0 B2@3 PAIR F3@3 B1@0
             B3@3 I2@0 W2@0 I3@0 W3@0
    rank 1:  F0@1 F0@2 F1@1 F1@2 F2@1 B0@2 PAIR F2@2 B0@1 PAIR F3@1 B1@2 PAIR F3@2 B1@1 B2@2 B2@1
             I3@2 I3@1 W3@2 W3@1

    Rank r holds stages r and 2p-1-r.
    """
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipev: found {counted(num_microbatches, 'microbatches')} on {counted(num_ranks, 'ranks')}, "
            f"needed at least {2 * num_ranks}; raise batch.global, or use zbv, which runs with fewer"
        )
    return [
        _TwoStageRank(rank, 2 * num_ranks - 1 - rank).run(rank, num_ranks, num_microbatches)
        for rank in range(num_ranks)
    ]


DUALPIPEV = ScheduleFamily(dualpipev, name="dualpipev", placed="v", held="bounded")


class _TwoStageRank:
    """Writes the order of a rank with two stages; `first`'s stream reaches it earlier."""

    def __init__(self, first: int, second: int):
        self.first = first
        self.second = second
        self.order: list[Action] = []
        self.forwards = {first: 0, second: 0}
        self.backwards = {first: 0, second: 0}
        self.weights: deque[Action] = deque()  # put off, of both stages, in the order of their I

    def run(self, distance: int, half: int, num_microbatches: int) -> list[Action]:
        """Return the order of the rank `distance` from the end of `half`; counts are a stage's."""
        first = self.first
        second = self.second
        to_middle = half - 1 - distance
        for _ in range(2 * to_middle):  # 1: the first stream passes
            self.forward(first)
        for _ in range(distance + 1):  # 2: the second has come
            self.forward(first)
            self.forward(second)
        for _ in range(to_middle):  # 3: backwards of the second begin
            self.input(second)
            self.weight()
            self.forward(second)
        for turn in range(num_microbatches - 2 * half + distance + 1):  # 4: steady, all in pairs
            # nobody is after the middle: in turn is earlier than together
            if turn == 0 and to_middle == 0:
                self.forward(first)
                self.backward(second)
            else:
                self.pair(first, second)
            self.pair(second, first)
        for _ in range(to_middle):  # 5: no forwards are left in the first
            self.backward(second)
            self.pair(second, first)
        for turn in range(2 * (distance + 1)):  # 6: only backwards; in the second half W is put off
            backward = self.backward if turn < distance + 1 else self.input
            backward(first if turn % 2 else second)
        for _ in range(to_middle):  # 7
            self.weight()
            self.input(first)
        for _ in range(distance + 1):  # 8
            self.weight()
        return self.order

    def forward(self, stage: int) -> None:
        self.order.append(F(self.forwards[stage], stage))
        self.forwards[stage] += 1

    def backward(self, stage: int) -> None:
        self.order.append(B(self.backwards[stage], stage))
        self.backwards[stage] += 1

    def pair(self, forward: int, backward: int) -> None:
        self.order.append(PAIR)
        self.forward(forward)
        self.backward(backward)

    def input(self, stage: int) -> None:
        """Run the backward for inputs and put off the weights."""
        self.order.append(I(self.backwards[stage], stage))
        self.weights.append(W(self.backwards[stage], stage))
        self.backwards[stage] += 1

    def weight(self) -> None:
        self.order.append(self.weights.popleft())
