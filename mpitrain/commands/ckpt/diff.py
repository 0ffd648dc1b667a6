"""`mpitrain ckpt diff`: print what differs between two checkpoints."""

import json
from collections.abc import Callable, Iterator

from mpitrain.checkpoint.differences import ArrayDifference, Names, compared, kind_of, measured, require_some
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.steps import same_everywhere, steps_at
from mpitrain.cluster.team import Team
from mpitrain.errors import DONE, FAILED, CheckpointError, counted
from mpitrain.inputs import shown
from mpitrain.plan.declared.formatting import Column, tabled, thousands

MOST_SHOWN = 40
COLUMNS = (
    Column("array", "name"),
    Column("numbers that differ", "count", thousands), Column("of", "size", thousands),
    Column("by at most", "most", "{:.3g}".format), Column("largest", "scale", "{:.3g}".format),
)  # fmt: skip


def diff(team: Team, one: str, other: str, only: str, say: Callable[[str], None]) -> int:
    """Say what differs; return 0 if nothing does, else 1. only: what names of arrays begin with. Collective.

    Chunks whose digests are equal aren't read. Raises CheckpointError if a checkpoint can't be
    opened, or no name begins so.
    """
    both = team.on_first_rank("finding them", lambda: [steps_at(path) for path in (one, other)])
    a, b = team.on_every_rank("opening them", lambda: [steps.open(steps.newest) for steps in both])
    with a, b:
        for checkpoint in (a, b):
            same_everywhere(team, checkpoint)
        team.on_every_rank("looking for names", lambda: require_some(a, b, only))
        names = compared(a, b, only)
        others = [[*_name_lines(a, b, names)], [*_about(a, b)]]
        try:
            differences = measured(team, a, b, names.differing)
        except CheckpointError as error:
            if team.rank == 0:
                say(error.args[0])
            return FAILED
    if team.rank == 0:
        if a.digest == b.digest and not any(others):
            arrays = counted(len(names.equal) + len(names.differing), "arrays")
            say(
                f"equal: {arrays}, root digest {a.digest}, as they were committed; "
                "mpitrain ckpt verify reads them"
            )
        else:
            for text in _report_lines(names, differences, others):
                say(text)
    return FAILED if names.lone or names.unlike or names.differing else DONE


def _name_lines(a: Checkpoint, b: Checkpoint, names: Names) -> Iterator[str]:
    for name in names.lone:
        yield f"only in {'the first' if name in a.names() else 'the second'}: {name}"
    for name in names.unlike:
        yield f"{name}: {kind_of(a.array(name))} in the first, {kind_of(b.array(name))} in the second"


def _report_lines(names: Names, differences: list[ArrayDifference], others: list[list[str]]) -> Iterator[str]:
    """Yield what differs. others: lines of each kind that are about other things than numbers."""
    num_equal, num_differing = len(names.equal), len(names.differing)
    yield f"equal: {counted(num_equal, 'arrays')}; different: {num_differing}{':' if differences else ''}"
    if differences:
        yield tabled(COLUMNS, differences[:MOST_SHOWN])
    if len(differences) > MOST_SHOWN:
        yield f"  ... and {len(differences) - MOST_SHOWN:,} more, which differ by less"
    for lines in others:
        yield from lines[:MOST_SHOWN]
        if len(lines) > MOST_SHOWN:
            yield f"... and {len(lines) - MOST_SHOWN:,} more"


def _about(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    for what, (one, other) in (("meta", (a.meta, b.meta)), ("config", (a.about.settings, b.about.settings))):
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                first, second = (shown(json.dumps(facts.get(key), default=str)) for facts in (one, other))
                yield f"{what} {shown(key)}: {first} in the first, {second} in the second"
