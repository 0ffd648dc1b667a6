"""The measured timeline of each instruction of each rank, for Perfetto and chrome://tracing.

One process per replica of the pipeline, one track per pipeline rank; `mpitrain schedule compare
--trace` reads it back. A receive lasts as long as the rank waited for it, a send only until it was
started. Of a pair the forward is drawn with a third of the time. On a GPU, whose times are read
after the step, an instruction begins when what was queued before it is over.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpitrain.cluster.resident import anonymous
from mpitrain.comm.base.world import World
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.meters.clock_offset import offset_to_first_rank
from mpitrain.comm.meters.clocks import HOST, Clock, Mark
from mpitrain.inputs import write_regular
from mpitrain.schedules.actions import COMPUTE, Action
from mpitrain.schedules.table import Table


class InstructionMeters:
    """What an instruction of this rank sent and waited for, by axis, and what it left in memory."""

    def __init__(self, mesh: Mesh, device: torch.device, clock: Clock):
        self._accounts = {name: axis.account for name, axis in mesh.axes.items() if axis.size > 1}
        self._device = device
        self._late = clock.late  # then nobody may ask within a step how long a wait was
        self._before = self._now()

    def _now(self) -> dict[str, tuple[int, float]]:
        return {
            name: (account.num_bytes, 0.0 if self._late else account.read().blocked_s)
            for name, account in self._accounts.items()
        }

    def read(self) -> dict[str, Any]:
        """Return what was counted since the last reading."""
        now = self._now()
        used = {name: (now[name][0] - sent, now[name][1] - s) for name, (sent, s) in self._before.items()}
        self._before = now
        device = self._device
        return {
            "bytes": sum(sent for sent, _ in used.values()),  # bytes that the rank sent meanwhile
            # seconds that it stood still meanwhile for an axis, by axis; on a GPU nobody knows
            "blocked_s": {name: s for name, (_, s) in used.items() if s > 0},
            # bytes after it: that torch has allocated on a GPU, or of the process that no file backs
            "held": torch.cuda.memory_allocated(device) if device.type == "cuda" else anonymous(),
        }


class Recorder:
    """The events of this rank. `steps` are recorded, no others, by the times of a clock."""

    def __init__(self, steps: range, clock: Clock = HOST, meters: InstructionMeters | None = None):
        self.steps = steps
        self._clock = clock
        self._meters = meters
        # step, instruction, begin, end, of time.perf_counter()
        self.events: list[tuple[int, str, float, float]] = []
        self.counted: list[dict[str, Any]] = []  # what meters read of each event
        # of the step under way, if it is recorded
        self._marked: list[tuple[tuple[Action, ...], Mark, Mark, dict[str, Any]]] | None = None

    def begin(self, step: int) -> None:
        """A step begins. Waits for a device to be idle, if the step is recorded."""
        if step in self.steps:
            self._marked = []
            self._step = step
            self._read()
            self._first, self._first_s = self._clock.now()

    def mark(self) -> Mark:
        """Return this moment, if it is recorded."""
        return None if self._marked is None else self._clock.mark()

    def add(self, action: Action, begin: Mark, end: Mark) -> None:
        """Record one instruction."""
        if self._marked is not None:
            self._marked.append(((action,), begin, end, self._read()))

    def add_pair(self, pair: Action, forward: Action, backward: Action, begin: Mark, end: Mark) -> None:
        """Record a pair, of which only the whole time is known."""
        if self._marked is not None:
            self._marked += [((pair,), begin, begin, {}), ((forward, backward), begin, end, self._read())]

    def _read(self) -> dict[str, Any]:
        return {} if self._meters is None else self._meters.read()

    def end(self) -> None:
        """The step is over: read when its instructions were. Waits for a device."""
        marked = self._marked or ()
        self._marked = None
        for actions, *marks, counted in marked:
            begin, end = (self._first_s + self._clock.seconds(self._first, mark) for mark in marks)
            between = begin + (end - begin) / 3
            spans = [(begin, end)] if len(actions) == 1 else [(begin, between), (between, end)]
            self.events += [(self._step, str(action), *span) for action, span in zip(actions, spans)]
            # of a pair the backward has what both counted
            self.counted += [{}] * (len(actions) - 1) + [counted]

    def forget(self, step: int) -> None:
        """Drop what was recorded after a step, which is computed again."""
        kept = [pair for pair in zip(self.events, self.counted) if pair[0][0] <= step]
        self.events, self.counted = [event for event, _ in kept], [counted for _, counted in kept]


# of each rank: replica, pipeline rank, (step, name, begin, duration, what meters read)
Events = list[tuple[int, int, list[tuple[int, str, float, float, dict[str, Any]]]]]


def gather_events(recorder: Recorder, mesh: Mesh, world: World) -> Events | None:
    """Return on rank 0 the events of all ranks on its clock, None on others. Collective over all ranks."""
    offset = offset_to_first_rank(world)
    mine = [
        (step, name, begin + offset, end - begin, counted)
        for (step, name, begin, end), counted in zip(recorder.events, recorder.counted)
    ]
    # the ranks of tp run the same program, each its own part
    replica = mesh["data"].rank * mesh["tp"].size + mesh["tp"].rank
    return world.gather("their part of the trace", (replica, mesh["pp"].rank, mine))


def write_trace(
    path: Path, events_of_ranks: Events, table: Table, num_replicas: int, works: Sequence[float] = ()
) -> None:
    """Write the events of all ranks. num_replicas: of data parallelism. works: StagePlan.work of stages.

    Raises OSError.
    """
    zero = min((event[2] for _, _, events in events_of_ranks for event in events), default=0.0)
    traced: list[dict[str, Any]] = []
    for dp, pp, events in events_of_ranks:
        traced += _tracks(dp, pp) + [_event(dp, pp, zero, event) for event in events]
    other = {
        "schedule": table.name,  # the pipeline schedule
        "copies": table.copies,  # copies of the model: 2 with dualpipe
        "segments": table.segments,  # segments of a sequence: more than 1 with seq1f1b
        "dp": num_replicas,  # data-parallel ranks
        "works": list(works),  # multiplications a token of each stage's blocks
    }
    whole = {
        "traceEvents": traced,  # the events, one for each instruction of each rank
        "displayTimeUnit": "ms",  # for the viewer
        "otherData": other,  # what mpitrain schedule compare --trace needs besides
    }
    write_regular(path, json.dumps(whole).encode())


def _event(
    dp: int, pp: int, zero: float, event: tuple[int, str, float, float, dict[str, Any]]
) -> dict[str, Any]:
    step, name, begin, duration, counted = event
    kind = name.rstrip("0123456789@/")
    category = "compute" if kind in COMPUTE else "message" if kind.startswith(("SEND", "RECV")) else "other"
    return {
        "ph": "X",  # X: an instruction; M: the name of a row
        "name": name,  # the instruction, as mpitrain program prints it
        "cat": category,  # compute, message or other
        "pid": dp,  # replica: rank of data and tensor parallelism
        "tid": pp,  # pipeline rank
        "ts": (begin - zero) * 1e6,  # begin in microseconds, on the clock of rank 0
        "dur": duration * 1e6,  # duration in microseconds
        "args": {"step": step, **counted},  # args.step: the number of the step; and what was counted
    }


def _tracks(dp: int, pp: int) -> list[dict[str, Any]]:
    names = (("process_name", f"replica {dp}"), ("thread_name", f"pipeline rank {pp}"))
    return [{"ph": "M", "name": what, "pid": dp, "tid": pp, "args": {"name": name}} for what, name in names]
