"""Sum gradients over other axes than the data axis: which buckets, in which order, and where.

A bucket can have copies on other ranks, of which each has part of the gradient. It then has a chain
of instructions; each starts one sum, and waits for what the one before it has started:

    SUM3@1/0      over an axis whose ranks run the same program
    SUM3@1/1      over an axis that joins two pipeline ranks: it meets SUM3@5/1 of the other
    REDUCE3@1     over the data axis

A SUM stands where its bucket is complete, and what waits for it after the next computation, so
that the sum travels meanwhile. Ranks start the sums of an axis in one order; where their programs
differ, it is that in which both have completed the buckets. Whoever waits for another pipeline rank
has sent everything before. Hence no deadlock: a rank that waits in a chain waits for a rank that
computes, or that waits for an earlier sum.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import COMPUTE, OF_GRADIENTS, PAIR, REDUCE, SENDS, SUM, Action
from mpitrain.schedules.lowering.reductions import Reduction

# of buckets with the same weights on first and last stage; a rank's are added to its first one
TIED = "tied"
MIRROR = "mirror"  # the axis of a stage and the same stage of the other copy

Key = tuple[int, int]  # (stage, bucket)


class Chains:
    """The instructions that each bucket's gradients go through. rank_of: the rank of each stage."""

    def __init__(self, reduces: Sequence[Reduction], rank_of: Sequence[int] | Mapping[int, int], depth: int):
        self.reduces = reduces
        self.rank_of = rank_of
        self.depth = depth
        keys = [
            (stage, bucket)
            for stage, reduction in enumerate(reduces)
            for bucket in range(len(reduction.ready))
        ]
        self.tied = [key for key in keys if TIED in self._axes(key)]
        self._chains = {key: self._chain(*key) for key in keys}

    def refuse_misplaced(self) -> None:
        """Raise ScheduleError if tied weights are where their axis doesn't reach.
        It joins the first copy's ends.
        """
        ends = {self.rank_of[0], self.rank_of[self.depth - 1]}
        if self.tied and {self.rank_of[stage] for stage, _ in self.tied} != ends:
            places = ", ".join(f"stage {stage} on rank {self.rank_of[stage]}" for stage, _ in self.tied)
            raise ScheduleError(
                f"tied weights: found {places}; needed the second copy's first and last stage on the ranks "
                "of the first's"
            )

    def owner(self, key: Key) -> Key:
        """Return the bucket here that one is added to first: itself, but for tied weights."""
        return self._first_tied(self.rank_of[key[0]]) if TIED in self.first_over(key) else key

    def of(self, key: Key) -> list[Action]:
        """Return what a bucket goes through, in order; nothing, if it is added to another one."""
        return self._chains.get(key, [])

    def first_over(self, key: Key) -> tuple[str, ...]:
        """Return the axes that a bucket is summed over before the data axis."""
        stage, bucket = key
        return self.reduces[stage].over[bucket] if self.reduces[stage].over else ()

    def before(self, action: Action) -> list[Action]:
        """Return what has started the sums whose result a SUM or REDUCE takes, on the same rank."""
        chain = self.of((action.stage, action.index))
        if action not in chain:
            return []
        at = chain.index(action)
        if action.kind == "SUM" and REDUCE(action.index, action.stage) in chain[:at]:
            return [
                REDUCE(bucket, stage)
                for stage, bucket in self.tied
                if self.rank_of[stage] == self.rank_of[action.stage]
            ]
        return chain[at - 1 : at] if at else []

    def partner(self, action: Action) -> Action | None:
        """Return the SUM of another pipeline rank that a SUM meets, if its axis joins two."""
        if action.kind != "SUM" or action not in self.of((action.stage, action.index)):
            return None
        alike = {
            MIRROR: [((action.stage + self.depth) % (2 * self.depth), action.index)],
            TIED: self.tied,
        }.get(self.axis(action), [])
        others = [key for key in alike if self.rank_of[key[0]] != self.rank_of[action.stage]]
        return action._replace(stage=others[0][0], index=others[0][1]) if others else None

    def axis(self, action: Action) -> str:
        """Return the axis of a SUM."""
        return self._axes((action.stage, action.index))[action.part or 0]

    def _chain(self, stage: int, bucket: int) -> list[Action]:
        key = (stage, bucket)
        first = self.first_over((stage, bucket))
        if self.owner(key) != key:
            return []
        sums = [SUM(bucket, stage, number if len(first) > 1 else None) for number in range(len(first))]
        late = TIED in self._then(key) and key == self._first_tied(self.rank_of[stage])
        return [*sums, REDUCE(bucket, stage), *([SUM(bucket, stage)] if late else [])]

    def _first_tied(self, rank: int) -> Key:
        return next(key for key in self.tied if self.rank_of[key[0]] == rank)

    def _axes(self, key: Key) -> tuple[str, ...]:
        return self.first_over(key) + self._then(key)

    def _then(self, key: Key) -> tuple[str, ...]:
        stage, bucket = key
        return self.reduces[stage].then[bucket] if self.reduces[stage].then else ()


# ---------------------------------------------------------------- lowering


class _Spot(NamedTuple):
    """A place in a rank's program: before the instruction at `position`; of several there, in this order."""

    position: int
    turn: int
    order: int = 0


def with_sums(programs: Sequence[Sequence[Action]], chains: Chains) -> list[list[Action]]:
    """Put the chains of buckets that are summed over other axes into programs that reduce them."""
    rows = [_SummedRow(program, chains) for program in programs]
    spots = {}
    for row in rows:
        for key, index in row.complete.items():
            for turn, action in enumerate(chains.of(key)[:-1]):
                spots[action] = _Spot(index, turn)
                index = row.after(index)
    _in_one_order(spots, chains)
    for row in rows:
        for key in row.complete:
            *_, last, reduce = chains.of(key)
            index = row.after(spots[last].position)
            spots[reduce] = _Spot(
                max(index, row.sent) if chains.partner(last) else index, spots[last].turn + 1
            )
    return [[*row.filled(spots), *_late(rank, chains)] for rank, row in enumerate(rows)]


def _in_one_order(spots: dict[Action, _Spot], chains: Chains) -> None:
    """Let sums that join two ranks stand in one order on both, by when both are complete."""
    meetings = {tuple(sorted((action, other))) for action in spots if (other := chains.partner(action))}
    latest: dict[int, _Spot] = {}
    for order, meeting in enumerate(
        sorted(meetings, key=lambda pair: (max(spots[action] for action in pair), pair))
    ):
        for action in meeting:
            rank = chains.rank_of[action.stage]
            spots[action] = latest[rank] = max(spots[action], latest.get(rank, spots[action]))._replace(
                order=order
            )


def _late(rank: int, chains: Chains) -> list[Action]:
    """Return a rank's sums after the data axis: at the end, as they wait for reductions."""
    return [
        action
        for key in chains.tied
        if chains.rank_of[key[0]] == rank
        for action in chains.of(key)[1:]
        if not chains.first_over(key)
    ]


class _SummedRow:
    """A rank's program without the reductions of buckets that are summed over other axes first.

    complete: where in it each of those is complete.  sent: the place after its last send.
    """

    def __init__(self, program: Sequence[Action], chains: Chains):
        self._bare: list[Action] = []
        self.complete: dict[Key, int] = {}
        self.sent = 0
        for action in program:
            key = (action.stage, action.index)
            if action.kind == "REDUCE" and chains.first_over(key):
                self.complete[chains.owner(key)] = len(self._bare)
                continue
            self._bare.append(action)
            if action.kind in SENDS:
                self.sent = len(self._bare)

    def after(self, index: int) -> int:
        """Return the place after the next computation, or pair, with its sends and reductions."""
        bare = self._bare
        while index < len(bare) and bare[index].kind not in (*COMPUTE, PAIR.kind):
            index += 1
        index += 3 if bare[index : index + 1] == [PAIR] else 1
        while index < len(bare) and bare[index].kind in (*SENDS, *OF_GRADIENTS):
            index += 1
        return min(index, len(bare))

    def filled(self, spots: Mapping[Action, _Spot]) -> list[Action]:
        """Return the program with this rank's chains at their spots, sums before reductions."""
        mine = [action for action in spots if (action.stage, action.index) in self.complete]
        mine.sort(key=lambda action: (spots[action].turn, action.kind == "REDUCE", spots[action].order))
        result = []
        filled = 0
        for index, actions in groupby(
            sorted(mine, key=lambda action: spots[action].position), lambda action: spots[action].position
        ):
            result += [*self._bare[filled:index], *actions]
            filled = index
        return result + self._bare[filled:]
