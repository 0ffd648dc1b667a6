"""Events of torch's profiler, by instruction: times of operations, and one file of several ranks.

An operation belongs to the instruction within which the host has started or launched it. Events are
those of the Trace Event Format, which Perfetto and chrome://tracing open; times in microseconds.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import count
from typing import Any, NamedTuple

from mpitrain.schedules.actions import OF_GRADIENTS, RECEIVES, SENDS, Action
from mpitrain.schedules.lowering.needs import partner

Event = dict[str, Any]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what a GPU does
LAUNCHES = ("cuda_runtime", "cuda_driver")  # of the calls that have it do so
ON_HOST = ("cpu_op", "user_annotation")
OUTSIDE = "outside operators"  # of an instruction: Python, copies, MPI, waiting
WAITING = (*RECEIVES, *OF_GRADIENTS, "GATHER", "NORM")  # kinds of instructions that wait for ranks
MESSAGES, KERNEL_LAUNCHES, TOKENS = "messages", "launches", "data, between steps"  # a GPU waits for
BETWEEN = "between"  # instructions of a step
INSIDE_US = 0.001  # an arrow ends within a span, not at its end


class ProfilerOutput(NamedTuple):
    """What torch's profiler has recorded.

    instructions: of the names that were opened for instructions, their actions. steps: the names of
    steps. shift_us: leads from the times of events to those of rank 0's clock.
    """

    events: Sequence[Event]
    instructions: Mapping[str, tuple[Action, ...]]
    steps: Set[str]
    shift_us: float


class Operation(NamedTuple):
    """An operator or kernel, and the kind of the instruction that it is part of: F, B, F + B, UPDATE."""

    name: str
    kind: str


class Cost(NamedTuple):
    """Of an operation over all steps: its own time, without that of operations within it."""

    calls: int
    self_us: float

    def plus(self, other: "Cost") -> "Cost":
        return Cost(self.calls + other.calls, self.self_us + other.self_us)


class RankProfile(NamedTuple):
    """What one rank has of a profile.

    title: of the rank.  costs: by operation; of kernels where there are some.
    idle_us: of a GPU, while it did nothing, by what it waited for.
    sends: of each message the instruction that receives it, and when it was sent; receives: of each
    the instruction, and when it was over.  replica: messages stay within.
    """

    title: str
    replica: int
    num_steps: int
    events: list[Event]
    costs: dict[Operation, Cost]
    sends: list[tuple[str, float]]
    receives: list[tuple[str, float]]
    idle_us: dict[str, float] = {}


class SpanLookup:
    """Spans of one thread, which don't overlap, to look up a moment in."""

    def __init__(self, events: Iterable[Event]):
        self.events = sorted(events, key=lambda event: event["ts"])
        self._begins = [event["ts"] for event in self.events]

    def at(self, time_us: float) -> Event | None:
        """Return the span around a moment."""
        number = bisect_right(self._begins, time_us) - 1
        span = self.events[number] if number >= 0 else None
        return span if span and time_us <= span["ts"] + span["dur"] else None


def rank_profile(recorded: ProfilerOutput, title: str, replica: int) -> RankProfile:
    """Return what a rank has of a profile, of what was recorded there."""
    shift_us = recorded.shift_us
    kept = (event for event in recorded.events if _is_of_rank(event))
    events = [{**event, "ts": event["ts"] + shift_us} if "ts" in event else dict(event) for event in kept]
    named = [event for event in events if event.get("cat") == "user_annotation"]
    instructions = SpanLookup(event for event in named if event["name"] in recorded.instructions)
    steps = SpanLookup(event for event in named if event["name"] in recorded.steps)
    actions = recorded.instructions
    device_times = _device_times(events)
    costs = defaultdict[Operation, Cost](lambda: Cost(0, 0.0))
    own = actions.keys() | recorded.steps
    for event, self_us, time_us in device_times or _host_times(events):
        if steps.at(time_us) is not None:
            span = instructions.at(time_us)
            around = actions[span["name"]] if span else ()
            kind = " + ".join(action.kind for action in around) or BETWEEN
            operation = Operation(OUTSIDE if event["name"] in own else event["name"], kind)
            costs[operation] = costs[operation].plus(Cost(1, self_us))
    idle_us = _idle(device_times, instructions, actions)
    events += _launched(device_times, instructions)
    messages = _messages(instructions, actions)
    return RankProfile(title, replica, len(steps.events), events, dict(costs), *messages, idle_us)


def _is_of_rank(event: Event) -> bool:
    """Return whether an event is kept: processes' names and a GPU's instructions are given anew."""
    if event["ph"] == "M":
        return event["name"].startswith("thread_")
    return isinstance(event.get("pid"), int) and event.get("cat") not in ("Trace", "gpu_user_annotation")


def _host_times(events: Iterable[Event]) -> Iterator[tuple[Event, float, float]]:
    """Yield the host's operators, which nest within a thread, with their own time and begin."""
    threads = defaultdict[Any, list[Event]](list)
    for event in events:
        if event["ph"] == "X" and event.get("cat") in ON_HOST:
            threads[event["tid"]].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        within = [0.0] * len(thread)  # of each, what lies directly within it
        around = list[int]()
        for number, event in enumerate(thread):
            while around and thread[around[-1]]["ts"] + thread[around[-1]]["dur"] <= event["ts"]:
                around.pop()
            if around:
                within[around[-1]] += event["dur"]
            around.append(number)
        for event, inside in zip(thread, within):
            yield event, max(0.0, event["dur"] - inside), event["ts"]


def _device_times(events: Sequence[Event]) -> list[tuple[Event, float, float]]:
    """Return what a GPU did, with its time and when it was launched."""
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    return [
        (event, event["dur"], launches.get(event["args"].get("correlation"), event["ts"]))
        for event in events
        if event.get("cat") in ON_DEVICE
    ]


def _idle(
    work: Iterable[tuple[Event, float, float]],
    instructions: SpanLookup,
    actions: Mapping[str, tuple[Action, ...]],
) -> dict[str, float]:
    """Return how long a GPU did nothing, from its first to its last work, by what it waited for.

    What ends a gap says why: it was queued before, and came after messages on another stream; or
    the host launched it late, from a computation, from an instruction that waits for ranks, or
    between two steps, where tokens are read. work: of the GPU, see _device_times().
    """
    idle = Counter[str]()
    over = math.inf  # when all before is over
    for event, duration_us, launched in sorted(work, key=lambda item: item[0]["ts"]):
        if event["ts"] > over:
            span = instructions.at(launched)
            named = actions[span["name"]] if span else ()
            if launched <= over or any(action.kind in WAITING for action in named):
                reason = MESSAGES
            else:
                reason = KERNEL_LAUNCHES if named else TOKENS
            idle[reason] += event["ts"] - over
        over = event["ts"] + duration_us if over == math.inf else max(over, event["ts"] + duration_us)
    return dict(idle)


def _launched(work: Iterable[tuple[Event, float, float]], instructions: SpanLookup) -> list[Event]:
    """Return a span on each stream of a GPU around what an instruction has launched there."""
    around = dict[tuple, Event]()
    for event, duration_us, launch_us in work:
        span = instructions.at(launch_us)
        if span is None:
            continue
        place = event["pid"], event["tid"], span["ts"]
        begin, end = event["ts"], event["ts"] + duration_us
        if known := around.get(place):
            begin, end = min(begin, known["ts"]), max(end, known["ts"] + known["dur"])
        where = dict(ph="X", cat="instruction", name=span["name"], pid=event["pid"], tid=event["tid"])
        around[place] = where | dict(ts=begin, dur=end - begin)
    return list(around.values())


def _messages(
    instructions: SpanLookup, actions: Mapping[str, tuple[Action, ...]]
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """Return the sends of a rank by their receives, and its receives."""
    sends = []
    receives = []
    for event in instructions.events:
        (action, *_) = actions[event["name"]]
        if action.kind in SENDS:
            sends.append((str(partner(action)), event["ts"]))
        elif action.kind in RECEIVES:
            receives.append((event["name"], max(event["ts"], event["ts"] + event["dur"] - INSIDE_US)))
    return sends, receives


def merged(ranks: Mapping[int, RankProfile]) -> dict[str, Any]:
    """Return the file of some ranks, by their number: one process each, and an arrow for each message."""
    ids = defaultdict[tuple, int](count(1).__next__)
    traced: list[Event] = []
    for rank, part in ranks.items():
        traced += _process(rank, part.title)
        traced += [_event_of_rank(event, rank, ids) for event in part.events]
    traced += _arrows(ranks, ids)
    begins = (event["ts"] for part in ranks.values() for event in part.events if event["ph"] == "X")
    zero = min(begins, default=0.0)
    traced = [_from(zero, event) for event in traced]
    return {
        "traceEvents": traced,  # the events: torch's own; step 20 and F3@1 are spans around them
        "displayTimeUnit": "ms",  # for the viewer
    }


def _from(zero: float, event: Event) -> Event:
    return {**event, "ts": round(event["ts"] - zero, 3)} if "ts" in event else event


def _process(rank: int, title: str) -> list[Event]:
    names = {"process_name": {"name": title}, "process_sort_index": {"sort_index": rank}}.items()
    return [{"ph": "M", "name": what, "pid": rank, "tid": 0, "args": args} for what, args in names]


def _event_of_rank(event: Event, rank: int, ids: Mapping[tuple, int]) -> Event:
    """Return an event in the process of its rank; numbers of arrows are one rank's own."""
    if "id" in event:
        event = {**event, "id": ids[rank, event.get("cat"), event["id"]]}
    return {**event, "pid": rank}


def _arrows(ranks: Mapping[int, RankProfile], ids: Mapping[tuple, int]) -> Iterator[Event]:
    """Yield the two ends of each message between ranks: the n-th send and receive of a name."""
    begun = dict[tuple, tuple[int, float]]()
    for rank, part in ranks.items():
        seen = Counter[str]()
        for receive, time_us in part.sends:
            begun[part.replica, receive, seen[receive]] = rank, time_us
            seen[receive] += 1
    for rank, part in ranks.items():
        seen = Counter[str]()
        for receive, time_us in part.receives:
            key = part.replica, receive, seen[receive]
            seen[receive] += 1
            if key in begun:
                source, sent_us = begun[key]
                both = {"cat": "message", "name": receive, "id": ids[key]}
                yield {"ph": "s", **both, "pid": source, "tid": _thread(ranks[source]), "ts": sent_us}
                end = {"ph": "f", "bp": "e", **both, "pid": rank, "tid": _thread(part)}
                # clocks of two nodes differ by microseconds, and arrows don't go back in time
                yield {**end, "ts": max(time_us, sent_us)}


def _thread(part: RankProfile) -> Any:
    return next(event["tid"] for event in part.events if event.get("cat") == "user_annotation")


def total_costs(parts: Iterable[RankProfile]) -> dict[Operation, Cost]:
    """Return what operations cost on several ranks, added up."""
    costs = dict[Operation, Cost]()
    for part in parts:
        for operation, cost in part.costs.items():
            costs[operation] = costs.get(operation, Cost(0, 0.0)).plus(cost)
    return costs
