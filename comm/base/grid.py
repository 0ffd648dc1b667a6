"""The layout of ranks, in integers, without MPI: coordinates, and who shares an axis with whom.

Rank order is fastest first (tp, cp, dp, pp): neighbours in tp are neighbours in rank, hence on one
node.

    Grid({"tp": 2, "dp": 2, "pp": 2})      rank 5 = tp 1, dp 0, pp 1

             dp 0       dp 1
    pp 0   [ 0  1 ]   [ 2  3 ]         axis tp of rank 5: (4, 5)
    pp 1   [ 4  5 ]   [ 6  7 ]         axis pp of rank 5: (1, 5)
"""

import math
from collections.abc import Mapping, Sequence

from mpitrain.errors import MeshError, counted


class Grid:
    """A box of ranks with named axes; every degree is at least 1 and their product is the number of ranks."""

    def __init__(self, degrees: Mapping[str, int]):
        for name, degree in degrees.items():
            if degree < 1:
                raise MeshError(f"{name} = {degree}: a degree is at least 1")
        self.degrees = dict(degrees)
        self.size = math.prod(self.degrees.values())

    def __str__(self) -> str:
        return " x ".join(f"{name}({degree})" for name, degree in reversed(self.degrees.items()))

    def require(self, world_size: int) -> None:
        """Raise MeshError unless the grid has exactly as many ranks as were started."""
        if self.size != world_size:
            raise MeshError(
                f"{self} = {counted(self.size, 'ranks')}, but mpirun started {world_size}; "
                f"start {self.size} or change parallel.*"
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` along every axis."""
        coordinates = {}
        for name, degree in self.degrees.items():
            rank, coordinates[name] = divmod(rank, degree)
        return coordinates

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at `coordinates`: the inverse of coordinates()."""
        rank = 0
        for name, degree in reversed(self.degrees.items()):
            rank = rank * degree + coordinates[name]
        return rank

    def group(self, rank: int, *axes: str) -> Sequence[int]:
        """Return the ranks that differ from `rank` along `axes` only, in order; a range if even."""
        unknown = set(axes) - set(self.degrees)
        if unknown:
            raise MeshError(f"no axis {sorted(unknown)} in {self}")
        here = self.coordinates(rank)
        first = rank
        offsets: Sequence[int] = range(1)
        stride = 1
        for name, degree in self.degrees.items():
            if name in axes and degree > 1:
                first -= here[name] * stride
                offsets = _repeated(offsets, degree, stride)
            stride *= degree
        if isinstance(offsets, range):
            return range(first, first + offsets.stop, offsets.step)
        return tuple(first + offset for offset in offsets)


def _repeated(offsets: Sequence[int], times: int, stride: int) -> Sequence[int]:
    """Return offsets, of which the first is 0, several times, each `stride` further."""
    if len(offsets) == 1:
        return range(0, times * stride, stride)
    if isinstance(offsets, range) and stride == len(offsets) * offsets.step:
        return range(0, times * stride, offsets.step)
    return tuple(at * stride + offset for at in range(times) for offset in offsets)


def split(length: int, size: int) -> list[int]:
    """Return the `size + 1` bounds that cut `length` elements, 0 too, into nearly equal shards."""
    return [length * i // size for i in range(size + 1)]
