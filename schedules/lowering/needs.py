"""What waits for what: dependencies of all ranks' actions, for order, deadlock and time."""

from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.schedules.actions import COMPUTE, INDEXED, OF_GRADIENTS, OFFLOAD, RECV_B, RECV_F, Action
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.sums import Chains

Programs = Sequence[Sequence[Action]]  # one per pipeline rank: lowered, or the ranks of a table


class ActionPlace(NamedTuple):
    """Where an action stands; positions count from 0."""

    rank: int
    position: int

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position}"


_OTHER_END = {
    "SEND_F": ("RECV_F", +1),
    "RECV_F": ("SEND_F", -1),
    "SEND_B": ("RECV_B", -1),
    "RECV_B": ("SEND_B", +1),
}


def partner(message: Action) -> Action:
    """Return the other end of a message: SEND_F3@1 and RECV_F3@2, SEND_B3@2 and RECV_B3@1 belong together."""
    kind, distance = _OTHER_END[message.kind]
    return Action(kind, message.index, message.stage + distance)


class Needs:
    """The dependencies of programs, maybe incomplete: an action can need one that nobody issues.

    steps: every action with its place, rank after rank.
    place: where each action stands first (NORM UPDATE SPREAD excepted: every rank has them). GATHER
    and RELEASE stand again.
    last_part: for (kind, microbatch, stage) the action that ends it, its last part.
    rank_of: the rank of each stage. copies, segments: as in a Table. A segment attends to the
    segments before it, and so its backward waits for theirs.
    reduces: as given to `lower`; without, it isn't known what sums of gradients wait for.
    """

    def __init__(
        self, programs: Programs, *, copies: int = 1, segments: int = 1, reduces: Sequence[Reduction] = ()
    ):
        self.programs = programs
        self.segments = segments
        self.steps = [
            (ActionPlace(rank, i), action)
            for rank, program in enumerate(programs)
            for i, action in enumerate(program)
        ]
        self.place: dict[Action, ActionPlace] = {}
        self.last_part: dict[tuple[str, int, int], Action] = {}
        self.rank_of: dict[int, int] = {}
        self._last_reduce: dict[tuple[int, int], Action] = {}
        for place, action in self.steps:
            if action.kind in INDEXED:
                self.place.setdefault(action, place)
            if action.kind == "REDUCE":
                self._last_reduce[action.stage, action.index] = action
            if action.kind in COMPUTE:
                self.rank_of.setdefault(action.stage, place.rank)
                if (action.part or 0) >= (self.last_part.get(action[:3], action).part or 0):
                    self.last_part[action[:3]] = action
        self.depth = (max(self.rank_of, default=0) + 1) // copies or 1
        ranks = {
            stage: self.rank_of.get(stage, min(stage, len(programs) - 1)) for stage in range(len(reduces))
        }
        self.chains = Chains(reduces, ranks, len(reduces) // copies)

    def end(self, rank: int) -> ActionPlace:
        """Return the place after a rank's last action."""
        return ActionPlace(rank, len(self.programs[rank]))

    def of(self, action: Action) -> list[Action]:
        """Return what must be done before `action` can start."""
        kind, m, stage, part = action
        if part and kind in COMPUTE:
            return [action._replace(part=part - 1)]
        match kind:
            case "F":
                offload = Action(OFFLOAD, m, stage)
                offloads = [offload] if offload in self.place else []
                return [*offloads, *self._input(m, stage), *self._segment_before(m, stage)]
            case "B" | "I":
                again = self.last_part.get(("R", m, stage))
                return [
                    again or self._end("F", m, stage),
                    *self._grad_of_output(m, stage),
                    *self._segment_after(m, stage),
                ]
            case "W":
                return [self._end("I", m, stage)]
            case "R" | "SEND_F":
                return [self._end("F", m, stage)]
            case "SEND_B":
                return [self._backward(m, stage)]
            case "RECV_F" | "RECV_B":
                return [partner(action)]
            case "SUM" | "REDUCE":
                return [self._last_of(need) for need in self.chains.before(action)]
        return []

    def met(self, action: Action) -> list[Action]:
        """Return the sums that another rank must have started, too, before `action` can take their result."""
        if action.kind not in OF_GRADIENTS:
            return []
        return [other for need in self.chains.before(action) if (other := self.chains.partner(need))]

    def num_parts(self, action: Action) -> int:
        """Return into how many parts this computation is divided; 1 if it is whole."""
        return 1 + (self.last_part[action[:3]].part or 0)

    def _last_of(self, need: Action) -> Action:
        """Return the last REDUCE of a bucket that has one for every microbatch; else `need`."""
        if need.kind != "REDUCE" or need in self.place:
            return need
        return self._last_reduce.get((need.stage, need.index), need)

    def _input(self, m: int, stage: int) -> list[Action]:
        if stage % self.depth == 0:
            return []
        return [RECV_F(m, stage)] if RECV_F(m, stage) in self.place else [self._end("F", m, stage - 1)]

    def _grad_of_output(self, m: int, stage: int) -> list[Action]:
        if stage % self.depth == self.depth - 1:
            return []
        return [RECV_B(m, stage)] if RECV_B(m, stage) in self.place else [self._backward(m, stage + 1)]

    def _segment_before(self, m: int, stage: int) -> list[Action]:
        return [self._end("F", m - 1, stage)] if m % self.segments else []

    def _segment_after(self, m: int, stage: int) -> list[Action]:
        return [self._backward(m + 1, stage)] if (m + 1) % self.segments else []

    def _backward(self, m: int, stage: int) -> Action:
        """Return the action after which the gradient of the stage's input is known."""
        return self._end("I" if ("I", m, stage) in self.last_part else "B", m, stage)

    def _end(self, kind: str, m: int, stage: int) -> Action:
        return self.last_part.get((kind, m, stage), Action(kind, m, stage))
