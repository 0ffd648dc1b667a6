"""Whole matrices out of the parts that ranks have, and their parts back, for an optimiser that
looks at whole matrices.

The parts of a matrix are on the ranks of one axis: tensor-parallel ranks, slowest, times the ranks
that divide the state (ZeRO). So what arrives in the order of the axis is one box of the matrix
after the other, each row by row. Matrices are dealt to these ranks, in rounds of one each at most:
whoever was dealt a matrix receives its parts, and sends the parts of the result back.

    rank                 0          1      2          3       2 of tp x 2 that divide the state
    has of every matrix  box 0 ----------  box 1 ----------   cut wherever the bucket is: not all
                                                              have a part of each
    is dealt in round 0  down       gate   up         output  the largest first
    is dealt in round 1  q                 k          v

What a rank has of the matrices that it is dealt stays where it is; every other element is sent once
to be computed with, and once back (to each copy of a box). If parts are as large as matrices, much
stays; if all n ranks have a part of each, 1/n: then n ranks send N (1 - 1/n) elements together, and
back. To gather N elements on all ranks would take N (n - 1), and all would compute the same.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_to_all_v
from mpitrain.comm.progress import Pending
from mpitrain.config import Config
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.division.buckets import map_bucket
from mpitrain.plan.division.domains import DENSE
from mpitrain.plan.division.stages import StagePlan


class MatrixPart(NamedTuple):
    """Consecutive elements of a matrix's box, on one rank."""

    spec: Spec
    length: int


Holding = dict[str, MatrixPart]  # what a rank has, by the names of matrices


def holdings(
    config: Config, stages: Sequence[StagePlan], num_shards: int, domain: str = DENSE
) -> list[Holding]:
    """Return what each rank of a domain's axis has of the domain's hidden matrices of some stages.

    These are between two layers, and not frozen: a row of the embedding or the head is one token's.
    """
    found = []
    for rank in range(config.parallel.tp):
        buckets = (bucket for stage in stages for bucket in stage.buckets(stage.shard(rank)))
        maps = [map_bucket(bucket.specs, num_shards) for bucket in buckets if bucket.domain == domain]
        for number in range(num_shards):
            runs = (run for mapped in maps for run in mapped.runs(number))
            hidden = (run for run in runs if run[0].group == "matrix" and not run[0].frozen)
            found.append({spec.name: MatrixPart(spec, end - begin) for spec, begin, end in hidden})
    return found


def deal(holdings: list[Holding], axis: Axis, like: torch.Tensor) -> list["MatrixRound"]:
    """Deal the matrices to the ranks of `axis`, the largest first: those of a round are alike."""
    queues = dealt(holdings)
    return [MatrixRound(names, holdings, axis, like) for names in zip_longest(*queues) if any(names)]


def dealt(holdings: list[Holding]) -> list[list[str]]:
    """Return the matrices of each rank.

    A rank gets its share of the work of those it has most of, and what others had too much of.
    """
    specs = {name: part.spec for holding in holdings for name, part in holding.items()}
    # multiplications, but for a factor
    work = {name: math.prod(spec.whole) * min(spec.whole) for name, spec in specs.items()}
    queues = [[] for _ in holdings]
    loads = [0] * len(holdings)
    for name in sorted(specs, key=lambda name: (-work[name], name)):
        lengths = [_length(holding.get(name)) for holding in holdings]
        most = lengths.index(max(lengths))
        if (loads[most] + work[name]) * len(holdings) > sum(work.values()):
            most = loads.index(min(loads))
        queues[most].append(name)
        loads[most] += work[name]
    return queues


class MatrixRound:
    """At most a matrix for each rank of the axis: names[r] for rank r, or None.

    `held`: those of which this rank has a part.
    like: of the type and on the device of the parts; a rank can have none.
    """

    def __init__(self, names: Sequence[str | None], holdings: list[Holding], axis: Axis, like: torch.Tensor):
        self._axis = axis
        self._like = like
        own = holdings[axis.rank]
        self.held = {name: own[name] for name in names if name in own}
        going = [own.get(name) for name in names]  # by the rank that it goes to
        # by the rank that it comes from
        coming = [holding.get(names[axis.rank]) for holding in holdings]
        # as to its shape, the same on all ranks
        self._spec = next((part.spec for part in coming if part), None)
        self._to, self._from = (tuple(map(_sent, parts)) for parts in (going, coming))
        self._back_to, self._back_from = (tuple(map(_length, parts)) for parts in (coming, going))

    @property
    def _dim(self) -> int:
        """Along which the boxes of the matrix lie."""
        return 0 if self._spec.shape[0] < self._spec.whole[0] else 1

    def poll(self) -> None:
        """Move on what is under way."""
        self._axis.progress.poll()

    def gather(self, parts: Mapping[str, torch.Tensor]) -> Pending:
        """Start sending this rank's flat parts to those that were dealt the matrices; collective."""
        sent = [parts[name] for name, part in self.held.items() if _sent(part)]
        return all_to_all_v(self._joined(sent), self._to, self._from, self._axis)

    def whole(self, received: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's matrix, if any, in new memory: a product's bits can depend on where."""
        if self._spec is None:
            return None
        return torch.cat(list(received.view(-1, *self._spec.shape)), self._dim)

    def scatter(self, result: torch.Tensor | None) -> Pending:
        """Start sending a result back to all that have parts of it, each copy; collective."""
        boxes = [] if result is None else result.split(self._spec.shape[self._dim], self._dim)
        copies = [box.flatten() for box in boxes for _ in range(self._spec.copies)]
        return all_to_all_v(self._joined(copies), self._back_to, self._back_from, self._axis)

    def parts(self, returned: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return this rank's parts of the results, flat."""
        return dict(zip(self.held, returned.split([part.length for part in self.held.values()])))

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self._like.new_empty(0), *parts])


def _length(part: MatrixPart | None) -> int:
    return part.length if part else 0


def _sent(part: MatrixPart | None) -> int:
    """Return how many elements a rank sends: of several copies of a box, one is enough."""
    return part.length if part and part.spec.copy == 0 else 0
