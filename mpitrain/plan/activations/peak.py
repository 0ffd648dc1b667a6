"""The most that the microbatches of a rank hold, played through its program."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpitrain.plan.activations.kept import Activations
from mpitrain.plan.activations.transients import Inside, Transients
from mpitrain.schedules.actions import COMPUTE, OFFLOAD, Action
from mpitrain.schedules.pairs import grouped
from mpitrain.schedules.table import Table


class PeakBytes(NamedTuple):
    """Bytes, each on top of those before: kept between computations, recomputed, worked with by one."""

    kept: int
    recomputed: int
    working: int


def peak_of(instructions: Sequence[Action], table: Table, stages: Mapping[int, Activations]) -> PeakBytes:
    """Return what a rank holds at most.

    Of a pair the forward keeps as much more as the backward has done with: both take turns, block
    by block, so the larger of the two is there, and what each holds beside what it keeps. A process
    has both for a while, for memory that one has done with isn't where the other wants it.
    """
    player = _MemoryPlayer(instructions, table, stages)
    kept = recorded = working = 0
    for group in grouped(instructions):
        computed = [action for action in group if action.kind in COMPUTE]
        if not computed:
            continue
        others = player.others(computed)
        inside = [player.inside(action) for action in computed]
        before = [player.held_of(action) for action in computed]
        for action in computed:
            player.play(action)
        kept = max(kept, player.held)
        stashes = [max(had, player.held_of(action)) for had, action in zip(before, computed)]
        most = others + max(stashes)
        most += sum(max(0, layer_bytes.recorded - stash) for layer_bytes, stash in zip(inside, stashes))
        recorded = max(recorded, most)
        working = max(working, others + sum(layer_bytes.working for layer_bytes in inside))
    recorded = max(kept, recorded)
    return PeakBytes(kept, recorded - kept, max(working - recorded, 0))


class _MemoryPlayer:
    def __init__(self, instructions: Sequence[Action], table: Table, stages: Mapping[int, Activations]):
        self._table = table
        self._stages = stages
        self._transients = {number: Transients(formulas) for number, formulas in stages.items()}
        self._last = {action[:3]: action for action in instructions}
        self._recomputed = {action[1:3] for action in instructions if action.kind == "R"}
        self._sent = {action[1:3] for action in instructions if action.kind == OFFLOAD}
        self._sent_transients = {
            stage: Transients(stages[stage].sent) for stage in {stage for _, stage in self._sent}
        }
        self._held = Counter[tuple[int, int]]()
        self._returned = Counter[tuple[int, int]]()
        self.held = 0  # all that is kept now

    def held_of(self, action: Action) -> int:
        """What is kept now of the microbatch of a computation in its stage."""
        return self._held[action.index, action.stage]

    def others(self, computed: Sequence[Action]) -> int:
        """Return what is kept of microbatches that nothing is computed of."""
        return self.held - sum(map(self.held_of, computed))

    def inside(self, action: Action) -> Inside:
        """Return what a computation holds of its own microbatch while it runs."""
        of_stages = self._sent_transients if action[1:3] in self._sent else self._transients
        transients, segment = of_stages[action.stage], action.index % self._table.segments
        if action.kind == "F" and action[1:3] in self._recomputed:
            return transients.dropped(segment)
        return transients.of(action.kind, segment, action.part)

    def play(self, action: Action) -> None:
        kind, index, stage, part = action
        done = self._last[action[:3]] == action
        formulas = self._formulas(action)
        segments = self._table.segments
        after = 0 if part is None else part + 1  # the first part that isn't done yet
        if kind in ("F", "R"):
            self._keep(index, stage, self._forwarded(action))
        elif kind == "B" and not done:
            self._keep(index, stage, formulas.kept(index % segments, after))
        elif kind == "I" and done:
            self._keep(index, stage, formulas.left())
        elif kind == "I":
            self._keep(index, stage, formulas.kept(index % segments, after) + formulas.left(end=after))
        elif kind == "W" and not done:
            self._keep(index, stage, formulas.left(first=after))
        elif kind in ("B", "W") and done:
            self._keep(index, stage, 0)
            if segments > 1:
                microbatch, segment = divmod(index, segments)
                returned = formulas.returned(segment)
                self.held += returned - self._returned[microbatch, stage]
                self._returned[microbatch, stage] = returned

    def _formulas(self, action: Action) -> Activations:
        formulas = self._stages[action.stage]
        return formulas.sent if action[1:3] in self._sent else formulas

    def _forwarded(self, action: Action) -> int:
        """Return what a forward leaves, or the one that runs again."""
        kind, index, stage, part = action
        formulas = self._formulas(action)
        if kind == "F" and (index, stage) in self._recomputed:
            return formulas.input()
        first = 0 if part is None else len(formulas.stage.parts) - 1 - part
        return formulas.kept(index % self._table.segments, first)

    def _keep(self, index: int, stage: int, num_bytes: int) -> None:
        self.held += num_bytes - self._held[index, stage]
        self._held[index, stage] = num_bytes


def put_away(instructions: Sequence[Action], table: Table, stages: dict[int, Activations]) -> int:
    """Return the bytes that offloaded activations take in host memory, from their forward to the
    end of their B or I.

    A buffer is used again for what has the same length: in all segments that is all but keys and
    values, which are longer in each.
    """
    if sent := {action[1:3] for action in instructions if action.kind == OFFLOAD}:  # else all are
        instructions = [action for action in instructions if action[1:3] in sent]
        stages = {number: formulas.sent for number, formulas in stages.items()}
    last = {action[:3]: action for action in instructions if action.kind in ("B", "I")}
    recomputed = {action[1:3] for action in instructions if action.kind == "R"}
    held, most = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    of_stage, together = Counter[int](), Counter[int]()
    for action in instructions:
        begins = action.kind == ("R" if action[1:3] in recomputed else "F") and not action.part
        ends = last.get(action[:3]) == action
        if begins or ends:
            held[action.stage, action.index % table.segments] += begins - ends
            of_stage[action.stage] += begins - ends
            most |= held
            together |= of_stage
    keys = {stage: stages[stage].on_host(1) - stages[stage].on_host(0) for stage in together}
    total = sum((stages[stage].on_host(0) - keys[stage]) * count for stage, count in together.items())
    return total + sum(keys[stage] * (segment + 1) * count for (stage, segment), count in most.items())
