"""The measured timeline: when each instruction of each rank began and ended, as a file that Perfetto and chrome://tracing open.

One process per replica of the pipeline, one track per pipeline rank; `mpitrain schedule compare --trace` reads it back. A receive lasts
as long as the rank waited for it, a send only until it was started. Of a pair, whose two computations take turns, the forward is
drawn with a third of the time.
"""

import json
from pathlib import Path
from typing import Any

from mpitrain.comm.clock import offset_to_first_rank
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.schedules.actions import Action
from mpitrain.schedules.table import Table


class Recorder:
    """The events of this rank. `steps` are recorded, no others."""

    def __init__(self, steps: range):
        self.steps = steps
        self.events: list[tuple[int, str, float, float]] = []  # step, instruction, begin, end

    def add(self, step: int, action: Action, begin: float, end: float) -> None:
        """Record one instruction; times are of time.perf_counter()."""
        if step in self.steps:
            self.events.append((step, str(action), begin, end))

    def add_pair(self, step: int, pair: Action, forward: Action, backward: Action, begin: float, end: float) -> None:
        """Record a pair, of which only the whole time is known."""
        between = begin + (end - begin) / 3
        for action, since, until in ((pair, begin, begin), (forward, begin, between), (backward, between, end)):
            self.add(step, action, since, until)


def write_trace(path: Path, recorder: Recorder, mesh: Mesh, world: World, table: Table) -> None:
    """Gather the events of all ranks and write them on rank 0, on rank 0's clock. Collective over all ranks."""
    offset = offset_to_first_rank(world)
    mine = [(step, name, begin + offset, end - begin) for step, name, begin, end in recorder.events]
    replica = mesh["data"].rank * mesh["tp"].size + mesh["tp"].rank  # the ranks of tp run the same program, each its own part
    every = world.gather("their part of the trace", (replica, mesh["pp"].rank, mine))
    if every is None:
        return
    zero = min((event[2] for _, _, events in every for event in events), default=0.0)
    traced: list[dict[str, Any]] = []
    for dp, pp, events in every:
        traced += _tracks(dp, pp) + [_event(dp, pp, zero, *event) for event in events]
    other = {"schedule": table.name, "copies": table.copies, "segments": table.segments, "dp": mesh["dp"].size}
    path.write_text(json.dumps({"traceEvents": traced, "displayTimeUnit": "ms", "otherData": other}), encoding="utf-8")


def _event(dp: int, pp: int, zero: float, step: int, name: str, begin: float, duration: float) -> dict[str, Any]:
    kind = name.rstrip("0123456789@/")
    category = "compute" if kind in ("F", "B", "I", "W") else "message" if kind.startswith(("SEND", "RECV")) else "other"
    times = {"ts": (begin - zero) * 1e6, "dur": duration * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": dp, "tid": pp, **times, "args": {"step": step}}


def _tracks(dp: int, pp: int) -> list[dict[str, Any]]:
    names = (("process_name", f"replica {dp}"), ("thread_name", f"pipeline rank {pp}"))
    return [{"ph": "M", "name": what, "pid": dp, "tid": pp, "args": {"name": name}} for what, name in names]
