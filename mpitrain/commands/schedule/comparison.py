"""`mpitrain schedule compare`: all schedules at one size: the fastest first, then what is dominated."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpitrain.commands.schedule.request import Request, play
from mpitrain.commands.schedule.text import figures, number, size_in_words, times_in_words
from mpitrain.errors import ScheduleError
from mpitrain.plan.declared.formatting import aligned
from mpitrain.schedules import catalog
from mpitrain.schedules.played import PROVED_AT_ONCE, Played
from mpitrain.schedules.search.problem import ROUNDING

FORMS = {  # of the table's columns, by their keys of JSON
    "makespan": number, "bound": number, "bubble": "{:.2%}".format, "span": number,
    "bubble_rate": "{:.4f}".format, "peak_stashes": number, "messages": str, "chunks": str, "copies": str,
}  # fmt: skip
LEGEND = (
    "makespan   time of a step that ends with an update on all ranks\n"
    "bound      shortest step of any order of these stages with this peak\n"
    "dominated  another schedule takes neither more time nor more stashes\n"
    "bubble     idle share of all ranks, from the beginning to the end of the makespan\n"
    "span       a rank's longest time from first to last computation; bubble rate is of it\n"
    "peak       stashes of a rank's whole share of layers, on the worst rank\n"
    "messages   sent by one rank, at most\n"
    "stages     a rank, of each copy of the model; copies: of all parameters"
)
TITLES = ("schedule", *(key.replace("chunks", "stages").replace("_", " ") for key in FORMS))


class Comparison(NamedTuple):
    """What was played, and why others are undefined at this size.

    played: the fastest first; after these what is dominated, and last what is above the limit.
    dominated: by the name of a schedule, that of one that takes neither more time nor more memory.
    """

    played: list[Played]
    undefined: dict[str, str]
    dominated: dict[str, str]


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
    dominated = dominations(played)
    played.sort(key=lambda one: (one.above_limit, one.table.name in dominated, *_order(one)))
    return Comparison(played, undefined, dominated)


def dominations(played: Sequence[Played]) -> dict[str, str]:
    """Return which schedules are dominated, and by which: the fastest of these.

    One with more copies of the model, or with sequences in segments, dominates none without. Of
    schedules that are equal none dominates.
    """
    within = sorted((one for one in played if not one.above_limit), key=_order)
    found = {}
    for one in played:
        better = next((other for other in within if _dominates(other, one)), None)
        if better is not None:
            found[one.table.name] = better.table.name
    return found


def _dominates(one: Played, other: Played) -> bool:
    if one.table.copies > other.table.copies or one.table.segments > other.table.segments:
        return False
    pairs = list(zip(_order(one), _order(other)))
    no_worse = all(mine <= theirs * (1 + ROUNDING) for mine, theirs in pairs)
    return no_worse and any(mine < theirs * (1 - ROUNDING) for mine, theirs in pairs)


def _fitting(request: Request, name: str) -> Request:
    takes = catalog.FAMILIES[name].takes
    left_out = [option for option in ("chunks", "group", "segments") if option not in takes]
    return request._replace(name=name, options=request.options._replace(**dict.fromkeys(left_out)))


def _order(played: Played) -> tuple[float, float]:
    return played.timeline.makespan, max(played.peak_stashes)


# ---------------------------------------------------------------- text


def as_text(comparison: Comparison) -> str:
    """Return a table for the screen."""
    first = comparison.played[0] if comparison.played else None
    rows = [TITLES, *(_cells(played, comparison.dominated) for played in comparison.played)]
    rows += [(f"{name} (undefined)", *["-"] * (len(TITLES) - 1)) for name in comparison.undefined]
    reasons = "\n".join(f"undefined: {name}, {reason}" for name, reason in comparison.undefined.items())
    parts = [_headline(first), aligned(rows), reasons, LEGEND] if first else [aligned(rows), reasons]
    return "\n\n".join(filter(None, parts))


def _headline(played: Played) -> str:
    limit = "" if played.memory_limit is None else f"; memory limit {number(played.memory_limit)} stashes"
    size = size_in_words(played)
    return f"{size}; {times_in_words(played.times)}{limit}; ideal {number(played.ideal)}"


def _cells(played: Played, dominated: Mapping[str, str]) -> tuple[str, ...]:
    name, found = played.table.name, figures(played)
    remarks = [*searched(played), *["above the limit"] * played.above_limit]
    remarks += ["not proved"] * (played.proof is None)
    if name in dominated and not played.above_limit:
        remarks.append(f"dominated by {dominated[name]}")
    return with_remarks(name, remarks), *(form(found[key]) for key, form in FORMS.items())


def searched(played: Played) -> list[str]:
    """Return how many stashes a search recomputes and offloads, if it does."""
    counts = {"recomputed": len(played.recomputed), "offloaded": len(played.offloaded)}
    return [f"{count} {what}" for what, count in counts.items() if count]


def with_remarks(name: str, remarks: Sequence[str]) -> str:
    return f"{name} ({', '.join(remarks)})" if remarks else name


# ---------------------------------------------------------------- for other programs


def as_json(comparison: Comparison) -> str:
    """Return one JSON object: `schedules`, in the order of the table, and `undefined` with the reasons."""
    dominated = comparison.dominated
    schedules = [
        {**figures(one), "above_limit": one.above_limit, "dominated_by": dominated.get(one.table.name)}
        for one in comparison.played
    ]
    return json.dumps({"schedules": schedules, "undefined": comparison.undefined})
