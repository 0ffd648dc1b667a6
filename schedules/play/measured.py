"""Read what a run measured, and predict it: its own times, played by the simulator.

A trace holds every instruction of some steps: when it began and ended, on clocks that agree. A
receive lasts as long as the rank waited, a send only until it was started. The update at the end of
a step is left out: it waits for all ranks.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from statistics import mean, median
from typing import Any, NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import AT_END, COMPUTE, RECEIVES, SENDS, Action, parse
from mpitrain.schedules.lowering.needs import Programs, partner
from mpitrain.schedules.play.simulate import Link, simulate
from mpitrain.schedules.play.timeline import Timeline

LATEST_MS = 1e15  # of a clock that began with this century or the last

# kind, stage, part: what takes the same time in every microbatch
Key = tuple[str, int | None, int | None]


class MeasuredTrace(NamedTuple):
    """The measured steps of a run, a timeline each, in ms from the first instruction of any rank.

    With data parallelism every replica's pipeline is a timeline of its own.
    """

    schedule: str
    segments: int
    copies: int
    steps: tuple[int, ...]
    timelines: tuple[Timeline, ...]
    works: tuple[float, ...] = ()  # of the blocks of each stage; (): not recorded


class Costs(NamedTuple):
    """What one step's instructions took, in milliseconds.

    An instruction counts from the end of the one before it: what lies between isn't lost. Of a
    receive only what comes before the wait counts, and of one that stands several times the mean.
    latency: from the end of a send until a rank that waits for it continues, on average.
    taking: the part of it that a rank also needs for a message that was there before.
    lead: when each rank begins, after the first of them.
    """

    times: dict[Action, float]
    latency: float
    taking: float
    lead: tuple[float, ...]


# ---------------------------------------------------------------- reading


def read_trace(text: str, name: str = "trace") -> MeasuredTrace:
    """Read a trace in Chrome's format; of several steps the first, slower one is left out.

    Raises ScheduleError naming the damaged event, or the rank or step that differs from the others.
    """
    try:
        return _trace(_content(text))
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error.args[0]}; needed a trace.json of a run with run.trace") from None


def _content(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except RecursionError:
        raise ScheduleError("is no JSON that can be read: brackets within brackets, too deep") from None
    except ValueError as error:
        raise ScheduleError(f"is no JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ScheduleError("found no list of traceEvents")
    return content


def _trace(content: dict[str, Any]) -> MeasuredTrace:
    rows = _rows(content["traceEvents"])
    if not rows:
        raise ScheduleError("found no instructions")
    steps = sorted({step for step, _ in rows})
    kept = steps[1:] or steps
    timelines = [
        _timeline(f"step {step}, replica {replica}", ranks)
        for (step, replica), ranks in sorted(rows.items())
        if step in kept
    ]
    for timeline in timelines:
        if timeline.programs != timelines[0].programs:
            raise ScheduleError("steps or replicas ran different programs")
    # finds an instruction that is missing while the file's name is still known
    simulate(timelines[0].programs)
    other = content.get("otherData")
    about = other if isinstance(other, dict) else {}
    segments = about.get("segments", 1)
    copies = about.get("copies", 1)
    for what, number in (("segments", segments), ("copies", copies)):
        if type(number) is not int or not 1 <= number < 10_000:
            raise ScheduleError(f"otherData has {what} {_start_of(number)}")
    works = _works(about.get("works"), timelines[0], copies)
    return MeasuredTrace(
        _start_of(about.get("schedule", "?")), segments, copies, tuple(kept), tuple(timelines), works
    )


def _works(found: object, timeline: Timeline, copies: int) -> tuple[float, ...]:
    if found is None:
        return ()
    stages = {action.stage for program in timeline.programs for action in program if action.kind == "F"}
    numbers = found if isinstance(found, list) else []
    fits = len(numbers) * copies == len(stages)
    if not fits or not all(type(one) in (int, float) and 0 < one <= LATEST_MS for one in numbers):
        raise ScheduleError(f"otherData has works {_start_of(found)}")
    return tuple(map(float, numbers))


Event = tuple[float, float, Action]


def _rows(events: list[object]) -> dict[tuple[int, int], dict[int, list[Event]]]:
    rows: dict[tuple[int, int], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for position, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        try:
            step = event["args"]["step"]
            replica = event["pid"]
            rank = event["tid"]
            begin = float(event["ts"]) / 1000
            duration = float(event["dur"]) / 1000
            action = parse(event["name"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ScheduleError(
                f"event {position} is damaged: {type(error).__name__} {error} in {_start_of(event)}"
            ) from None
        whole = all(type(number) is int and 0 <= number < 2**31 for number in (step, replica, rank))
        if not (whole and abs(begin) <= LATEST_MS and 0 <= duration <= LATEST_MS):  # nan is neither
            raise ScheduleError(f"event {position} is damaged: {_start_of(event)}")
        rows[step, replica][rank].append((begin, begin + duration, action))
    return rows


def _start_of(event: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(event)[:100])


def _timeline(where: str, ranks: dict[int, list[Event]]) -> Timeline:
    if sorted(ranks) != list(range(len(ranks))):
        raise ScheduleError(f"{where}: found pipeline ranks {str(sorted(ranks))[:100]}, one is missing")
    rows = [sorted(ranks[rank], key=lambda event: event[0]) for rank in range(len(ranks))]
    zero = min(row[0][0] for row in rows)
    rows = [[event for event in row[: _update(row)]] for row in rows]
    return Timeline(
        [[action for *_, action in row] for row in rows],
        [[begin - zero for begin, *_ in row] for row in rows],
        [[end - zero for _, end, _ in row] for row in rows],
        [0.0] * len(rows),
    )


def _update(row: list[Event]) -> int:
    return next((position for position, (*_, action) in enumerate(row) if action.kind in AT_END), len(row))


# ---------------------------------------------------------------- costs


def costs(timeline: Timeline) -> Costs:
    """Take the costs of one measured step."""
    samples: dict[Action, list[float]] = defaultdict(list)
    for action, before, begin, end in _instructions(timeline):
        since = begin if before is None else before
        samples[action].append((begin if action.kind in RECEIVES else end) - since)
    times = {action: _mean(found) for action, found in samples.items()}
    latency = _mean(lag for lag, _ in _arrivals(timeline) if lag is not None)
    taking = _mean(took for lag, took in _arrivals(timeline) if lag is None)
    return Costs(
        times,
        latency,
        min(taking, latency),
        tuple(starts[0] if starts else 0.0 for starts in timeline.starts),
    )


def typical(timelines: Iterable[Timeline]) -> dict[Key, float]:
    """Return the time of each kind of computation on each stage.

    The mean over a step's microbatches, which keeps what is slow only now and then, as with more
    ranks than cores; then the median over steps.
    """
    per_step: dict[Key, list[float]] = defaultdict(list)
    for timeline in timelines:
        samples: dict[Key, list[float]] = defaultdict(list)
        for action, time in costs(timeline).times.items():
            if action.kind in COMPUTE:
                samples[action.kind, action.stage, action.part].append(time)
        for key, times in samples.items():
            per_step[key].append(mean(times))
    return {key: median(means) for key, means in per_step.items()}


def _mean(values: Iterable[float]) -> float:
    """Return the mean, 0 of nothing, and 0 where clocks that differ give less."""
    values = list(values)
    return max(0.0, mean(values)) if values else 0.0


def _instructions(timeline: Timeline) -> Iterable[tuple[Action, float | None, float, float]]:
    """Yield every instruction, its predecessor's end on its rank, and its own begin and end."""
    for program, starts, ends in zip(timeline.programs, timeline.starts, timeline.ends):
        yield from zip(program, [None, *ends], starts, ends)


def _arrivals(timeline: Timeline) -> Iterable[tuple[float | None, float]]:
    """Yield each message's time from send's to receive's end (None: taken late), and the receive's."""
    sent = {action: end for action, _, _, end in _instructions(timeline) if action.kind in SENDS}
    for action, _, begin, end in _instructions(timeline):
        if action.kind in RECEIVES and partner(action) in sent:
            since = sent[partner(action)]
            yield end - since if begin <= since else None, end - begin


# ---------------------------------------------------------------- prediction


def predict(timeline: Timeline, costs: Costs) -> Timeline:
    """Play a measured step with these costs; only who waits for whom, and how long, is simulated.

    Raises ScheduleError if an instruction is missing that another waits for.
    """
    programs = [
        [Action("LEAD", rank), *_with_calls(program)] for rank, program in enumerate(timeline.programs)
    ]

    def cost(action: Action) -> float:
        if action.kind == "LEAD":
            return costs.lead[action.index]
        if action.kind == "TAKE":
            return costs.taking
        return costs.times.get(action._replace(kind=action.kind.removeprefix("CALL_")), 0.0)

    return _without_calls(simulate(programs, cost, Link(costs.latency - costs.taking)), timeline.programs)


def _with_calls(program: Iterable[Action]) -> Iterable[Action]:
    """Put the time that messages cost their ranks around them: the simulator's have none."""
    for action in program:
        if action.kind in SENDS + RECEIVES:
            yield action._replace(kind=f"CALL_{action.kind}")
        yield action
        if action.kind in RECEIVES:
            yield Action("TAKE")


def _without_calls(played: Timeline, programs: Programs) -> Timeline:
    """Return the programs' own timeline; taking a message is part of its receive."""
    starts = []
    ends = []
    for program, began, ended in zip(played.programs, played.starts, played.ends):
        kept = [
            i for i, action in enumerate(program) if not action.kind.startswith(("LEAD", "CALL_", "TAKE"))
        ]
        starts.append([began[i] for i in kept])
        ends.append([ended[i + (program[i].kind in RECEIVES)] for i in kept])
    return Timeline(programs, starts, ends, played.exposed)
