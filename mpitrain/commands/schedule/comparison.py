"""`mpitrain schedule compare`: all schedules at one size, the fastest first."""

import json
from typing import NamedTuple

from mpitrain.commands.schedule.request import Request, play
from mpitrain.commands.schedule.text import number
from mpitrain.errors import ScheduleError
from mpitrain.plan.declared.formatting import aligned
from mpitrain.schedules import catalog
from mpitrain.schedules.played import PROVED_AT_ONCE, Played

TITLES = (
    "schedule", "makespan", "bubble", "span", "bubble rate", "peak stashes", "messages", "stages", "copies",
)  # fmt: skip


class Comparison(NamedTuple):
    """What was played, the fastest first, and why others are undefined at this size."""

    played: list[Played]
    undefined: dict[str, str]


def compare(request: Request) -> Comparison:
    """Prove and play every schedule of the catalogue.

    An option that a schedule has no use for is left out for it.
    """
    played = []
    undefined = {}
    for name in catalog.NAMES:
        try:
            played.append(play(_fitting(request, name), PROVED_AT_ONCE // len(catalog.NAMES)))
        except ScheduleError as error:
            undefined[name] = str(error.args[0]).removeprefix(f"{name}: ")
    return Comparison(sorted(played, key=_order), undefined)


def _fitting(request: Request, name: str) -> Request:
    takes = catalog.FAMILIES[name].takes
    return request._replace(
        name=name, **{option: None for option in ("chunks", "group", "segments") if option not in takes}
    )


def _order(played: Played) -> tuple[float, float]:
    return played.timeline.makespan, max(played.peak_stashes)


# ---------------------------------------------------------------- text


def as_text(comparison: Comparison) -> str:
    """Return a table for the screen."""
    first = comparison.played[0] if comparison.played else None
    rows = [TITLES, *map(_cells, comparison.played)]
    rows += [(f"{name} (undefined)", *["-"] * (len(TITLES) - 1)) for name in comparison.undefined]
    lines = [_headline(first)] if first else []
    reasons = "\n".join(f"undefined: {name}, {reason}" for name, reason in comparison.undefined.items())
    return "\n\n".join(part for part in (*lines, aligned(rows), reasons, _legend(first)) if part)


def _headline(played: Played) -> str:
    forward, grad, weight, message = map(number, played.times)
    limit = "" if played.memory_limit is None else f"; memory limit {number(played.memory_limit)} stashes"
    size = f"{played.num_ranks} ranks, {played.num_microbatches} microbatches"
    return (
        f"{size}; times F {forward}, I {grad}, W {weight}, message {message}{limit}; ideal "
        f"{number(played.ideal)}"
    )


def _cells(played: Played) -> tuple[str, ...]:
    remarks = ["above the limit"] * played.above_limit + ["not proved"] * (played.proof is None)
    return (
        f"{played.table.name} ({', '.join(remarks)})" if remarks else played.table.name,
        number(played.timeline.makespan),
        f"{played.timeline.bubble:.2%}",
        number(played.span),
        f"{played.bubble_rate:.4f}",
        number(max(played.peak_stashes)),
        str(max(played.messages)),
        str(max(map(len, played.chunks)) // played.table.copies),
        str(played.table.copies),
    )


def _legend(first: Played | None) -> str:
    if first is None:
        return ""
    return (
        "makespan   what a step costs that ends with an update on all ranks\n"
        "bubble     idle share of all ranks, from the beginning to the end of the makespan\n"
        "span       a rank's longest time from first to last computation; bubble rate is of it\n"
        "peak       stashes of a rank's whole share of layers, on the worst rank\n"
        "messages   sent by one rank, at most\n"
        "stages     a rank, of each copy of the model; copies: of all parameters"
    )


# ---------------------------------------------------------------- for other programs


def as_json(comparison: Comparison) -> str:
    """Return one JSON object: `schedules`, the fastest first, and `undefined` with the reasons."""
    return json.dumps(
        {"schedules": [_numbers(played) for played in comparison.played], "undefined": comparison.undefined}
    )


def _numbers(played: Played) -> dict:
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
        "above_limit": played.above_limit,
        "proved": played.proof is not None,
    }
