"""What `mpitrain schedule NAME` prints: the grid and the numbers, or one JSON object."""

import json
from collections.abc import Sequence
from typing import Any

from mpitrain.errors import counted
from mpitrain.schedules.actions import COMPUTE
from mpitrain.schedules.formats.notation import operations
from mpitrain.schedules.options import UNIT_TIMES, Times
from mpitrain.schedules.play.draw import MOST_LINES, grid, least_lines
from mpitrain.schedules.played import Played
from mpitrain.schedules.time_and_memory import StepSize

MOST_RANKS = 32  # in the table of ranks


def as_text(played: Played, width: int, *, whole: bool = False) -> str:
    """Return grid and numbers; `whole` draws the grid whatever its size."""
    lines = least_lines(played.table, width)
    if whole or lines <= MOST_LINES:
        picture = "\n".join([grid(played.table, width=width), *_legend(played)])
    else:
        picture = (
            f"The grid has {lines} lines or more: write it to a file with --out grid.txt, or draw "
            "it with --out picture.svg"
        )
    return "\n\n".join(["\n".join([headline(played), *played.table.notes]), picture, *_numbers(played)])


def _legend(played: Played) -> list[str]:
    """Explain what stands in the cells, where it isn't only F and B."""
    table = played.table
    kinds = {action.kind for actions in table.ranks for action in actions}
    stages = max(map(len, played.chunks))
    words = ["I backward for inputs, W for weights, B both"] * ("I" in kinds)
    words += ["R recomputation"] * ("R" in kinds)
    second = "second copy of the model" if table.copies > 1 else "second stage of the rank"
    words += [f"lower case: the {second}"] * (stages == 2)
    words += [f"F0.1: on the second of the rank's {stages} stages"] * (stages > 2)
    words += ["F0a F0b: segments of a sequence"] * (table.segments > 1)
    words += ["F3+B1: run together"] * ("PAIR" in kinds)
    words += ["drawn in unit time, --out draws to scale"] * (played.times != UNIT_TIMES)
    return ["; ".join(words)] if words else []


def size_in_words(of: Played | StepSize) -> str:
    return f"{counted(of.num_ranks, 'ranks')}, {counted(of.num_microbatches, 'microbatches')}"


def headline(played: Played) -> str:
    """Say what was played: `zbv: 8 ranks, 16 microbatches, 2 stages a rank; F 1, I 1, W 1, message 0`."""
    table = played.table
    words = [size_in_words(played)]
    stages = max(map(len, played.chunks)) // table.copies
    words += [f"{stages} stages a rank"] * (stages > 1)
    words += ["two copies of the model, half of the microbatches each"] * (table.copies > 1)
    words += [f"{table.segments} segments a microbatch"] * (table.segments > 1)
    return f"{table.name}: {', '.join(words)}; {times_in_words(played.times)}"


def times_in_words(times: Times) -> str:
    """Write the times of --times."""
    forward, grad, weight, message = map(number, times)
    return f"times F {forward}, I {grad}, W {weight}, message {message}"


def number(value: float) -> str:
    """Write a time with as many digits as it needs, at most six."""
    return f"{float(value):.6g}"


def _numbers(played: Played) -> list[str]:
    idle = played.timeline.bubble
    above = played.timeline.makespan / played.bound - 1
    lines = [
        f"makespan     {number(played.timeline.makespan)}, of which {number(played.ideal)} "
        f"compute: bubble {idle:.2%}",
        f"bound        {number(played.bound)}, the shortest step of any order with this peak: "
        f"{above:.2%} above it",
        f"span         {number(played.span)}, a rank's longest time from first to last "
        f"computation: bubble rate {played.bubble_rate:.4f}",
        f"peak         {number(max(played.peak_stashes))} stashes of a rank's whole share of "
        f"layers{_limit(played)}",
    ]
    number_of_all = played.table.num_stages * played.table.num_microbatches
    for what, stashes in (("recomputed", played.recomputed), ("offloaded", played.offloaded)):
        if stashes:
            lines.append(f"{what:13}{len(stashes)} of {number_of_all} stashes")
    if played.times.message:
        lines.append(
            f"exposed      {number(max(played.timeline.exposed))} of waiting for messages under "
            "way, on the worst rank"
        )
    return ["\n".join(lines), _ranks(played), _proof(played)]


def _limit(played: Played) -> str:
    if played.memory_limit is None:
        return ""
    return f", {'ABOVE' if played.above_limit else 'within'} the limit of {number(played.memory_limit)}"


def _ranks(played: Played) -> str:
    """Return a row per rank; of many ranks the first and the last."""
    makespan = played.timeline.makespan
    rows = [("rank", "stages", "idle", "bubble", "in flight", "whole stashes", "messages")]
    figures = zip(played.chunks, played.idle, played.peak_in_flight, played.peak_stashes, played.messages)
    for rank, (stages, idle, peak, whole, messages) in enumerate(figures):
        times = number(idle), f"{idle / makespan:.2%}"
        rows.append((str(rank), " ".join(map(str, stages)), *times, str(peak), number(whole), str(messages)))
    if len(rows) > MOST_RANKS + 1:
        half = MOST_RANKS // 2
        rows = [*rows[: half + 1], ("...",) * len(rows[0]), *rows[-half:]]
    return right_aligned(rows)


def right_aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _proof(played: Played) -> str:
    proof = played.proof
    if proof is None:
        return (
            "not proved here: the schedule is too large; `mpitrain check` and every run prove it "
            "before the first message"
        )
    return (
        f"proved: {counted(proof.num_actions, 'instructions')} complete and in order, "
        f"{counted(proof.num_messages, 'messages')} matched, no deadlock without buffering"
    )


# ---------------------------------------------------------------- for other programs


def as_json(played: Played) -> str:
    """Return one JSON object; docs/guides/schedules.md explains its keys."""
    return json.dumps(as_dict(played))


def figures(played: Played) -> dict[str, Any]:
    """Return what is one value of a played schedule, by its key; of ranks the most."""
    return {
        "schedule": played.table.name,
        "makespan": played.timeline.makespan,
        "bubble": played.timeline.bubble,
        "span": played.span,
        "bubble_rate": played.bubble_rate,
        "peak_stashes": max(played.peak_stashes),
        "messages": max(played.messages),
        "chunks": max(map(len, played.chunks)) // played.table.copies,
        "copies": played.table.copies,
        "bound": played.bound,
        "proved": played.proof is not None,
        "recomputed": len(played.recomputed),
        "offloaded": len(played.offloaded),
    }


def as_dict(played: Played) -> dict[str, Any]:
    """Return all that is known, times as --times, operations as schedules/formats/notation.py."""
    table = played.table
    timeline = played.timeline
    numbers = range(played.num_ranks)
    return {
        **figures(played),
        "stages": played.num_ranks,
        "microbatches": played.num_microbatches,
        "segments": table.segments,
        "placement": [list(stages) for stages in played.chunks],
        "times": dict(zip(("F", "I", "W", "C"), played.times)),
        "stage_times": played.stage_times and [list(times) for times in played.stage_times],
        "notes": list(table.notes),
        "ideal": played.ideal,
        "idle": played.idle,
        "busy": [timeline.busy(rank) for rank in numbers],
        "exposed": list(timeline.exposed),
        "peak_in_flight": played.peak_in_flight,
        "peak_stashes": played.peak_stashes,
        "weight_memory": played.weight_memory,
        "memory_limit": played.memory_limit,
        "above_limit": played.above_limit,
        "messages": played.messages,
        "ranks": operations(table),
        "starts": [_starts(played, rank) for rank in numbers],
    }


def _starts(played: Played, rank: int) -> list[float]:
    """Return when each operation of `ranks` starts; a pair is one."""
    timeline = played.timeline
    starts = []
    paired = 0
    for action, start in zip(timeline.programs[rank], timeline.starts[rank]):
        if action.kind == "PAIR":
            paired = 2
        elif action.kind in COMPUTE:
            if paired != 1:
                starts.append(start)
            paired = max(0, paired - 1)
    return starts
