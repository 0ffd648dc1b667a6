"""What correct programs obey, one rule per function; each raises a Flaw at the first breach.

The rules of buckets, their parameters and gradients, are in bucket_rules.
"""

from collections import defaultdict
from collections.abc import Sequence

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import (
    ADD_TO_GRADIENTS,
    AT_END,
    COMPUTE,
    COPY,
    INDEXED,
    PAIR,
    RECEIVES,
    REPEATED,
    SENDS,
    Action,
)
from mpitrain.schedules.lowering.needs import ActionPlace, Needs, partner


class Flaw(ScheduleError):
    """A broken rule: what, and where."""

    def __init__(self, place: ActionPlace, text: str):
        super().__init__(f"{place}: {text}")
        self.place = place


def nothing_twice(needs: Needs) -> None:
    """Refuse an action that stands twice, on one rank or on two. (GATHER and RELEASE may.)"""
    for place, action in needs.steps:
        if action.kind in INDEXED and action.kind not in REPEATED and needs.place[action] != place:
            raise Flaw(place, f"{action} again; it already stands at {needs.place[action]}")


def nothing_foreign(needs: Needs, num_stages: int, num_microbatches: int) -> None:
    """Refuse stages and microbatches that don't exist."""
    for place, action in needs.steps:
        if action.kind not in INDEXED:
            continue
        if action.stage >= num_stages:
            raise Flaw(place, f"{action}: there is no stage {action.stage}, the pipeline has {num_stages}")
        microbatch = (
            action.part
            if action.kind == "REDUCE"
            else None
            if action.kind in (*REPEATED, "SUM")
            else action.index
        )
        if microbatch is not None and microbatch >= num_microbatches:
            raise Flaw(
                place, f"{action}: there is no microbatch {microbatch}, the step has {num_microbatches}"
            )


# ---------------------------------------------------------------- completeness


def everything_computed(needs: Needs, num_stages: int, num_microbatches: int, train: bool) -> None:
    """Demand one F and one B, or one F, I and W, of every microbatch on every stage; allow one R.

    In evaluation one F only.
    """
    for stage in range(num_stages):
        rank = needs.rank_of.get(stage, min(stage, len(needs.programs) - 1))
        for m in range(num_microbatches):
            kinds = {kind for kind in COMPUTE if (kind, m, stage) in needs.last_part}
            split = bool(kinds & {"I", "W"})
            wanted = {"F"} if not train else {"F", "I", "W"} if split else {"F", "B"}
            for kind in sorted(wanted - kinds):
                raise Flaw(
                    needs.end(rank),
                    f"the program ends without {Action(kind, m, stage)}{_elsewhere(needs, m, kinds)}",
                )
            for kind in sorted(kinds - wanted - ({"R"} if train else set())):
                extra = needs.last_part[kind, m, stage]
                raise Flaw(
                    needs.place[extra],
                    f"{extra} is too much: needed only {' '.join(sorted(wanted))} of this microbatch",
                )


def _elsewhere(needs: Needs, m: int, kinds: set[str]) -> str:
    """Say where a microbatch is that a stage has nothing of: that may be one too many."""
    found = next((action for _, action in needs.steps if action.kind in COMPUTE and action.index == m), None)
    return "" if kinds or found is None else f"; of microbatch {m} there is {found} ({needs.place[found]})"


def parts_complete(needs: Needs, num_parts: Sequence[int] | None) -> None:
    """Demand that what is walked in parts has all of them, as many as its stage has if that is known."""
    found: dict[tuple[str, int, int], list[int | None]] = defaultdict(list)
    for _, action in needs.steps:
        if action.kind in COMPUTE:
            found[action[:3]].append(action.part)
    for key, parts in found.items():
        last = needs.last_part[key]
        wanted = needs.num_parts(last) if num_parts is None else num_parts[last.stage]
        if parts != [None] and set(parts) != set(range(wanted)):
            names = ", ".join("the whole" if part is None else str(part) for part in parts)
            raise Flaw(
                needs.place[last], f"{Action(*key)} is there in parts: {names}; needed 0 to {wanted - 1}"
            )


# ---------------------------------------------------------------- order


def needs_come_first(needs: Needs, *, messages: bool = True) -> None:
    """Demand that what an action needs is issued before it on its rank, or sent and received.

    Without `messages`, as in a table, other ranks aren't looked at.
    """
    for place, action in needs.steps:
        for need in needs.of(action):
            there = needs.place.get(need)
            if there is None:
                nobody = (
                    f"rank {needs.rank_of[need.stage]} never" if need.stage in needs.rank_of else "no rank"
                )
                raise Flaw(place, f"{action} waits for {need}, which {nobody} issues")
            if action.kind in RECEIVES:
                continue  # comes from another rank, at a time that only playing all ranks can tell
            if there.rank != place.rank:
                if not messages:
                    continue
                raise Flaw(
                    place,
                    f"{action} needs {need} of rank {there.rank}, but no receive brings it to rank "
                    f"{place.rank}",
                )
            if there.position > place.position:
                raise Flaw(
                    place, f"{action} stands before {need} (position {there.position}), which it needs"
                )


def messages_matched(needs: Needs) -> None:
    """Demand that every send has its receive, on another rank; the reverse follows from needs."""
    for place, action in needs.steps:
        if action.kind in SENDS:
            there = needs.place.get(partner(action))
            if there is None:
                raise Flaw(place, f"{action} has no receiver: {partner(action)} is nowhere")
            if there.rank == place.rank:
                raise Flaw(
                    place,
                    f"{action} is received by its own rank (position {there.position}); stages of one rank "
                    "need no message",
                )


def gradients_ascend(needs: Needs) -> None:
    """Demand ascending microbatches in all that adds to a stage's gradients.

    Of matrices part by part, and of vectors. Sums then have one order in all schedules, and the
    same bits. Segments of one microbatch descend, as their backwards must.
    """
    # part None: a whole one
    latest: dict[tuple[int, bool], dict[int | None, Action]] = defaultdict(dict)
    for place, action in needs.steps:
        for matrices in (True, False):
            if action.kind in (ADD_TO_GRADIENTS if matrices else ("B", "I")):
                before = latest[action.stage, matrices]
                for part, earlier in before.items():
                    same = part == action.part or part is None or action.part is None
                    if same and _turn(earlier, needs.segments) > _turn(action, needs.segments):
                        raise Flaw(
                            place,
                            f"{action} adds to the gradients of stage {action.stage} after {earlier}; the "
                            "order must ascend",
                        )
                before[action.part] = action


def _turn(action: Action, segments: int) -> tuple[int, int]:
    microbatch, segment = divmod(action.index, segments)
    return microbatch, -segment


def pairs_fit(needs: Needs) -> None:
    """Demand a forward and a backward, or a part of each, after PAIR; neither waits for the other."""
    for place, action in needs.steps:
        if action == PAIR:
            two = needs.programs[place.rank][place.position + 1 : place.position + 3]
            names = " ".join(map(str, two)) or "nothing"
            if [member.kind for member in two] != ["F", "B"] or len(
                {member.part is None for member in two}
            ) == 2:
                raise Flaw(
                    place,
                    f"PAIR stands before {names}, needed a forward and a whole backward, or one part of each",
                )
            if two[0] in needs.of(two[1]):
                raise Flaw(
                    place,
                    f"PAIR stands before {names}, and {two[1]} waits for {two[0]}: they can't run together",
                )


# ---------------------------------------------------------------- copies, and the update


def copy_at_begin(needs: Needs, train: bool) -> None:
    """Demand that COPY begins all training programs, or none: it has the whole step to travel.

    All ranks of its axis start it together.
    """
    copies = train and any(COPY in program for program in needs.programs)
    for rank, program in enumerate(needs.programs):
        if copies and program[:1] != [COPY]:
            raise Flaw(ActionPlace(rank, 0), "the program doesn't begin with COPY, which others have")
        for position, action in enumerate(program):
            if action == COPY and not (copies and position == 0):
                needed = "at the beginning" if train else "none"
                raise Flaw(ActionPlace(rank, position), f"COPY stands out of place: needed {needed}")


def update_at_end(needs: Needs, train: bool) -> None:
    """Demand NORM UPDATE [SPREAD] at the end of training programs, and nowhere else."""
    for rank, program in enumerate(needs.programs):
        plain = [(position, action.kind) for position, action in enumerate(program) if action.kind in AT_END]
        wanted = AT_END[: max(2, len(plain))] if train else ()
        first = len(program) - len(wanted)
        for position, kind in plain:
            if position < first or kind != wanted[position - first]:
                needed = "NORM UPDATE [SPREAD] at the end" if train else "none"
                raise Flaw(ActionPlace(rank, position), f"{kind} stands out of place: needed {needed}")
        if len(plain) < len(wanted):
            raise Flaw(needs.end(rank), "the program ends without NORM UPDATE")
