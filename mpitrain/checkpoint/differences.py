"""What differs between two checkpoints, whatever layouts wrote them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpitrain.checkpoint.arrays import LogicalArray
from mpitrain.checkpoint.boxes import Box
from mpitrain.checkpoint.dtypes import NAMES, widened
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.verify import shares
from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.cluster.team import Team
from mpitrain.errors import CheckpointError
from mpitrain.inputs import shown

READ_BYTES = 1 << 24  # of each at once


class ArrayDifference(NamedTuple):
    """Of one array.

    count: numbers whose bits differ.
    most: the largest difference, nan where one isn't a number.
    scale: the largest.
    """

    name: str
    count: int
    size: int
    most: float
    scale: float


class Names(NamedTuple):
    """Names of arrays. lone: in one checkpoint only. unlike: of another dtype or shape in the other.

    equal, differing: of the same, by their digests.
    """

    lone: list[str]
    unlike: list[str]
    equal: list[str]
    differing: list[str]


def compared(a: Checkpoint, b: Checkpoint, only: str) -> Names:
    """Compare what is known of the arrays without reading them."""
    lone = [name for name in sorted({*a.names()} ^ {*b.names()}) if name.startswith(only)]
    names = Names(lone=lone, unlike=[], equal=[], differing=[])
    there = set(b.names())
    for name in a.names():
        if name not in there or not name.startswith(only):
            continue
        x = a.array(name)
        y = b.array(name)
        if kind_of(x) != kind_of(y):
            names.unlike.append(name)
        elif x.digests != y.digests:
            names.differing.append(name)
        else:
            names.equal.append(name)
    return names


def require_some(a: Checkpoint, b: Checkpoint, only: str) -> None:
    names = {*a.names(), *b.names()}
    if only and not any(name.startswith(only) for name in names):
        groups = ", ".join(sorted({name.partition("/")[0] for name in names}))
        raise CheckpointError(
            f"--only {shown(only)}: no array has a name that begins so; names begin with {shown(groups)}"
        )


def kind_of(array: LogicalArray) -> str:
    return f"{NAMES[array.dtype]} {list(array.shape)}"


def measured(team: Team, a: Checkpoint, b: Checkpoint, names: list[str]) -> list[ArrayDifference]:
    """Return how much arrays differ, the most first. Each rank reads some chunks. Collective."""
    chunks = [(name, chunk) for name in names for chunk in _differing(a.array(name), b.array(name))]
    sizes = [a.array(name).chunks.box(chunk).size * a.array(name).dtype.itemsize for name, chunk in chunks]
    mine = shares(list(zip(chunks, sizes)), sizes, team.size)[team.rank]

    def compare() -> dict[str, ArrayDifference]:
        differences: dict[str, ArrayDifference] = {}
        with ProgressBar("comparing", 2 * sum(size for _, size in mine), team.rank) as progress:
            for (name, chunk), size in mine:
                for box in _parts(a.array(name), chunk):
                    here = _compare(name, a.read(name, box.slices), b.read(name, box.slices))
                    differences[name] = _joined(
                        differences.get(name, here._replace(count=0, most=0.0, scale=0.0)), here
                    )
                progress.add(2 * size)
        return differences

    differences = team.on_every_rank("comparing", compare)
    whole: dict[str, ArrayDifference] = {}
    for part in team.all_gather("what differs", differences):
        for name, here in part.items():
            whole[name] = _joined(whole[name], here) if name in whole else here
    every = [
        difference._replace(size=int(np.prod(a.array(name).shape, dtype=np.int64)))
        for name, difference in whole.items()
    ]
    return sorted(
        every, key=lambda difference: (-np.nan_to_num(difference.most, nan=np.inf), difference.name)
    )


def _differing(a: LogicalArray, b: LogicalArray) -> list[int]:
    return [chunk for chunk in range(a.chunks.count) if a.digests[chunk] != b.digests[chunk]]


def _parts(array: LogicalArray, chunk: int) -> Iterator[Box]:
    """Yield boxes of rows that make a chunk. A row that is larger is read at once."""
    box = array.chunks.box(chunk)
    if not box.start:
        yield box
        return
    rows = max(1, READ_BYTES // max(1, array.dtype.itemsize * box.size // max(1, box.shape[0])))
    for row in range(box.start[0], box.stop[0], rows):
        yield Box((row, *box.start[1:]), (min(row + rows, box.stop[0]), *box.stop[1:]))


def _joined(one: ArrayDifference, other: ArrayDifference) -> ArrayDifference:
    # keeps nan
    most, scale = (float(np.maximum(getattr(one, key), getattr(other, key))) for key in ("most", "scale"))
    return one._replace(count=one.count + other.count, most=most, scale=scale)


def _compare(name: str, x: np.ndarray, y: np.ndarray) -> ArrayDifference:
    bits = f"u{x.dtype.itemsize}"
    count = int(np.count_nonzero(x.reshape(-1).view(bits) != y.reshape(-1).view(bits)))
    x, y = (widened(numbers).astype(np.float64) for numbers in (x, y))
    with np.errstate(invalid="ignore"):
        return ArrayDifference(
            name, count, x.size, float(np.max(np.abs(x - y), initial=0)), float(np.max(np.abs(x), initial=0))
        )
