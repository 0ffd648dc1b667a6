"""`mpitrain plan --timeline`: the predicted step as a file, in the form of a run's trace.json, or drawn.

One process, one track per pipeline rank: the other ranks do the same at the same time. Within a
computation stands what waits for messages of its axes, at its end.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.commands.output_file import write
from mpitrain.plan.predict.step_time.predicted_timeline import PredictedTimeline
from mpitrain.schedules.actions import COMPUTE, SENDS
from mpitrain.schedules.lowering.needs import partner

KINDS = (".json", ".svg")
INSIDE = 1e-3  # of a computation: an arrow begins so much before its end
Event = dict[str, Any]


def write_timeline(path: str, predicted: PredictedTimeline, title: str) -> None:
    """Write a timeline, drawn if the name ends with .svg.  Raises ConfigError."""
    if Path(path).suffix == ".svg":
        from mpitrain.commands.schedule.picture import draw_predicted

        write("--timeline", path, draw_predicted(predicted, title))
    else:
        write("--timeline", path, json.dumps(as_trace(predicted, title)).encode())


def as_trace(predicted: PredictedTimeline, title: str) -> dict[str, Any]:
    """Return the timeline in the Trace Event Format, times in microseconds."""
    table = predicted.table
    events = [_named("process_name", 0, f"predicted, {predicted.played}: {title}")]
    for rank in range(len(predicted.timeline.programs)):
        events.append(_named("thread_name", rank, f"pipeline rank {rank}"))
        events += _of_rank(predicted, rank)
    other = {"schedule": table.name, "copies": table.copies, "segments": table.segments}
    return {
        "traceEvents": [*events, *_arrows(predicted)],
        "displayTimeUnit": "ms",
        "otherData": {**other, "microbatches": predicted.num_microbatches, "played": predicted.num_played},
    }


def _named(what: str, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": 0, "tid": tid, "args": {"name": name}}


def _span(rank: int, name: str, category: str, begin_s: float, end_s: float) -> Event:
    times = {"ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": rank, **times, "args": {"step": 1}}


def _of_rank(predicted: PredictedTimeline, rank: int) -> Iterator[Event]:
    """Yield the instructions of a rank, and after them what a step ends with.

    An instruction of no time isn't there: a send, and a receive of what has arrived.
    """
    timeline = predicted.timeline
    for action, begin, end in zip(timeline.programs[rank], timeline.starts[rank], timeline.ends[rank]):
        if end <= begin:
            continue
        yield _span(rank, str(action), "compute" if action.kind in COMPUTE else "message", begin, end)
        if action.kind in COMPUTE:
            at = end
            for axis, took in predicted.exposed(action).items():
                yield _span(rank, f"exposed {axis}", "exposed", max(begin, at - took), at)
                at -= took
    at = timeline.makespan
    if predicted.state_s:
        yield _span(rank, "exposed dp", "exposed", at, at + predicted.state_s)
    at += predicted.state_s
    yield _span(rank, "UPDATE", "other", at, at + predicted.update_s)


def _arrows(predicted: PredictedTimeline) -> Iterator[Event]:
    """Yield both ends of each message: from the computation that makes it to the one that takes it."""
    timeline = predicted.timeline
    computed = {
        (action.kind == "F", action.index, action.stage): (rank, begin, end)
        for rank in range(len(timeline.programs))
        for action, begin, end in timeline.computations(rank)
        if action.kind not in ("W", "R")
    }
    sends = (action for program in timeline.programs for action in program if action.kind in SENDS)
    for number, send in enumerate(sends):
        receive = partner(send)
        source, begin, end = computed[send.kind == "SEND_F", send.index, send.stage]
        rank, taken, _ = computed[receive.kind == "RECV_F", receive.index, receive.stage]
        both = {"name": str(receive), "cat": "message", "id": number, "pid": 0}
        yield {"ph": "s", **both, "tid": source, "ts": (end - INSIDE * (end - begin)) * 1e6}
        yield {"ph": "f", "bp": "e", **both, "tid": rank, "ts": taken * 1e6}
