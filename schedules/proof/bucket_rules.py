"""What correct programs obey with buckets: parameters are there when needed, gradients complete."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count

from mpitrain.schedules.actions import ADD_TO_GRADIENTS, OF_GRADIENTS, REDUCE, Action
from mpitrain.schedules.lowering.needs import ActionPlace, Needs
from mpitrain.schedules.lowering.residency import Key, Residency
from mpitrain.schedules.lowering.sums import Chains
from mpitrain.schedules.pairs import grouped
from mpitrain.schedules.proof.rules import Flaw

# ---------------------------------------------------------------- parameters


def parameters_resident(needs: Needs, residency: Residency | None) -> None:
    """Demand that each part finds the buckets it needs, and that none are held but those it may have.

    A rank gathers buckets of its own stages, each only while it isn't held, and releases all. With
    until="step" each is gathered once. Without a residency it isn't known which part needs what.
    """
    for rank, program in enumerate(needs.programs):
        windows = [*residency.windows(program), []] if residency else []
        held = _Held(needs, rank)
        passed = 0
        places = (ActionPlace(rank, position) for position in count())
        for group in grouped(program):
            for action, place in zip(group, places):
                if action.kind == "GATHER":
                    held.gather(place, action, once=residency is not None and residency.until == "step")
                elif action.kind == "RELEASE":
                    held.release(place, action)
                keys = residency.needed(action) if residency else []
                held.refuse_missing(place, action, keys)
                if windows and (keys or action.kind == "GATHER"):
                    held.refuse_unwanted(place, action, windows[passed])
            passed += bool(residency and residency.needed_together(group))
        held.refuse_any()


class _Held:
    """The buckets that one rank holds as its program is read: where gathered, or last released."""

    def __init__(self, needs: Needs, rank: int):
        self.needs = needs
        self.rank = rank
        self.gathered: dict[Key, ActionPlace] = {}
        self.released: dict[Key, ActionPlace] = {}

    def gather(self, place: ActionPlace, action: Action, *, once: bool) -> None:
        key = (action.stage, action.index)
        if self.needs.rank_of.get(action.stage) != self.rank:
            raise Flaw(
                place, f"{action}: stage {action.stage} is on rank {self.needs.rank_of.get(action.stage)}"
            )
        if key in self.gathered:
            raise Flaw(place, f"{action} again; what {self.gathered[key]} has gathered was not released")
        if once and key in self.released:
            raise Flaw(
                place, f"{action} again, after its release at {self.released[key]}; needed once a step"
            )
        self.gathered[key] = place

    def release(self, place: ActionPlace, action: Action) -> None:
        key = (action.stage, action.index)
        if key not in self.gathered:
            raise Flaw(place, f"{action}: the bucket is not held")
        del self.gathered[key]
        self.released[key] = place

    def refuse_missing(self, place: ActionPlace, action: Action, keys: list[Key]) -> None:
        for stage, bucket in keys:
            if (stage, bucket) not in self.gathered:
                since = self.released.get((stage, bucket))
                reason = f"was released at {since}" if since else "no GATHER has fetched"
                raise Flaw(place, f"{action} needs bucket {bucket} of stage {stage}, which {reason}")

    def refuse_unwanted(self, place: ActionPlace, action: Action, wanted: list[Key]) -> None:
        """Refuse what is held too early or too late: it takes the room of what is needed."""
        for (stage, bucket), since in self.gathered.items():
            if (stage, bucket) not in wanted:
                names = ", ".join(f"{bucket}@{stage}" for stage, bucket in wanted) or "none"
                raise Flaw(
                    place,
                    f"{action}: bucket {bucket}@{stage}, gathered at {since}, is in the way; wanted here: "
                    f"{names}",
                )

    def refuse_any(self) -> None:
        for (stage, bucket), since in self.gathered.items():
            end = self.needs.end(self.rank)
            raise Flaw(end, f"the program ends without RELEASE{bucket}@{stage} of what {since} has gathered")


# ---------------------------------------------------------------- gradients


def reductions_follow(needs: Needs, *, each: bool = False) -> None:
    """Demand each SUM and REDUCE of each bucket once, after everything that adds to the bucket.

    each: one REDUCE for every microbatch, after everything of it that adds to the bucket, and
    before anything of another does; but of what is summed over other axes first, which is reduced
    once.
    """
    _all_there(needs, each)
    added: dict[Key, Action] = {}  # by bucket: what it has of a microbatch that isn't reduced yet
    for place, action in needs.steps:
        for first, *_ in _chains_of(needs, action, each):
            there = needs.place[first]
            if there.rank != place.rank or there.position < place.position:
                raise Flaw(there, f"{first} starts before {action} at {place} has added to its bucket")
            earlier = added.setdefault((first.stage, first.index), action)
            if first.kind == "REDUCE" and each and earlier.index != action.index:
                raise Flaw(
                    place,
                    f"{action} adds to bucket {first.index} of stage {first.stage} before that of {earlier} "
                    "is reduced",
                )
        if action.kind == "REDUCE":
            added.pop((action.stage, action.index), None)


def sums_meet(needs: Needs) -> None:
    """Demand that two pipeline ranks start their sums in one order, which matches them."""
    # by rank, the other rank, and axis
    started: dict[tuple[int, int, str], list[tuple[ActionPlace, Action]]] = defaultdict(list)
    for place, action in needs.steps:
        if partner := needs.chains.partner(action):
            started[place.rank, needs.place[partner].rank, needs.chains.axis(action)].append((place, action))
    for (rank, other, axis), sums in started.items():
        for (place, action), (there, found) in zip(sums, started[other, rank, axis]):
            if needs.chains.partner(action) != found:
                raise Flaw(
                    place,
                    f"{action} meets {needs.chains.partner(action)}, but what rank {other} starts then is "
                    f"{found} ({there})",
                )


def _chains_of(needs: Needs, action: Action, each: bool) -> Iterator[list[Action]]:
    if action.kind not in ADD_TO_GRADIENTS:
        return
    for bucket, ready in enumerate(needs.chains.reduces[action.stage].ready):
        if action.part is None or action.part <= ready:
            first, *rest = needs.chains.of(needs.chains.owner((action.stage, bucket)))
            yield [first._replace(part=action.index) if each and first.kind == "REDUCE" else first, *rest]


def _all_there(needs: Needs, each: bool) -> None:
    wanted = {
        member for _, action in needs.steps for chain in _chains_of(needs, action, each) for member in chain
    }
    started = {action: place for action, place in needs.place.items() if action.kind in OF_GRADIENTS}
    for action in sorted(wanted - started.keys(), key=str):
        raise Flaw(needs.end(needs.rank_of[action.stage]), f"the program ends without {action}")
    for action in sorted(started.keys() - wanted, key=lambda action: started[action]):
        raise Flaw(
            started[action], f"{action}: {_what_there_is(needs.chains, (action.stage, action.index), each)}"
        )


def _what_there_is(chains: Chains, key: Key, each: bool) -> str:
    stage, bucket = key
    number = len(chains.reduces[stage].ready)
    if bucket >= number or chains.of(key)[:1] == [REDUCE(bucket, stage)]:
        return f"stage {stage} has {number} buckets, reduced {'for every microbatch' if each else 'once'}"
    if not chains.of(key):
        return "its bucket is added to bucket {1} of stage {0}".format(*chains.owner(key))
    return f"its bucket goes through {' '.join(map(str, chains.of(key)))}"
