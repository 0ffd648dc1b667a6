"""Which parameters of a stage are stored, reduced and fetched together.

Integers and names only.

The backward of a stage is divided into parts, from the last block to the first, and the parameters
of a part are a bucket: when a part is done for the last microbatch, its bucket is complete and can
be reduced while the next part runs.

    blocks   embedding | block 0 | block 1 | block 2 | head
    parts    [     part 1      ] [          part 0         ]     bucket k is complete after part k

The tied embedding is a bucket of its own, complete last.

Weights and gradients of a bucket lie in flat buffers of one order. Every parameter begins on a
multiple of BLOCK elements, and so does every rank's shard of a buffer: a block belongs to one
parameter and to one rank, whoever holds it, and what is computed block by block (the gradient norm)
has the same bits in every layout.

    elements    0        1024      2048      3072      4096
    parameters  | norm - | q ------------------- | k -- |          padded to whole blocks
    shards of 2 |      rank 0      |      rank 1       |          as long as each other
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.domains import COUNTED, DENSE, domain_of, lends_gradients
from mpitrain.schedules.lowering.sums import MIRROR, TIED

BLOCK = 1024  # elements
# parameters, each with the part of the backward that adds to its gradient
Placed = list[tuple[Spec, int]]


class BucketPlan(NamedTuple):
    """Parameters that are reduced together, and the parts of the backward that use them.

    over, then: the axes their gradients are summed over before the data axis, and after it: `tied`,
    `tp`, `kv`, `mirror`.
    """

    specs: tuple[Spec, ...]
    parts: tuple[int, ...]
    over: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    domain: str = DENSE

    @property
    def tied(self) -> bool:
        """Whether the first and the last stage have its weights."""
        return TIED in self.over + self.then


class BucketMap(NamedTuple):
    """Where the parameters of a bucket begin in a flat buffer of `length` elements, cut into equal shards."""

    specs: tuple[Spec, ...]
    starts: tuple[int, ...]
    length: int
    num_shards: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return where the shard of `rank` begins and ends."""
        share = self.length // self.num_shards
        return rank * share, (rank + 1) * share

    def runs(self, rank: int) -> Iterator[tuple[Spec, int, int]]:
        """Yield the parameters that the shard of `rank` has elements of, [begin, end) of each."""
        return self.within(*self.bounds(rank))

    def within(self, first: int, last: int) -> Iterator[tuple[Spec, int, int]]:
        """Yield the parameters that elements [first, last) of the buffer are of, [begin, end) of each."""
        at = max(0, bisect_right(self.starts, first) - 1)
        for spec, start in zip(self.specs[at:], self.starts[at:]):
            if start >= last:
                break
            begin = max(start, first) - start
            end = min(start + spec.numel, last) - start
            if begin < end:
                yield spec, begin, end

    def by_shard(self, weights: Sequence[int]) -> np.ndarray:
        """Return what each shard has, [shards]; weights: what an element of each parameter counts."""
        if not self.specs:
            return np.zeros(self.num_shards, np.int64)
        numels = np.array([spec.numel for spec in self.specs])
        bounds = np.arange(self.num_shards + 1) * (self.length // self.num_shards)
        at = np.searchsorted(self.starts, bounds, "right") - 1
        before = np.cumsum(numels * weights) - numels * weights
        inside = np.minimum(bounds - np.array(self.starts)[at], numels[at])
        return np.diff(before[at] + inside * np.array(weights)[at])

    def gaps(self) -> Iterator[slice]:
        """Yield where no parameter is."""
        ends = (start + spec.numel for spec, start in zip(self.specs, self.starts))
        for end, start in zip((0, *ends), (*self.starts, self.length)):
            if end < start:
                yield slice(end, start)


def map_bucket(specs: tuple[Spec, ...], num_shards: int) -> BucketMap:
    """Lay parameters out in whole blocks, and pad the buffer to shards of whole blocks."""
    *starts, length = accumulate((-(-spec.numel // BLOCK) * BLOCK for spec in specs), initial=0)
    unit = BLOCK * num_shards
    return BucketMap(specs, tuple(starts), -(-length // unit) * unit, num_shards)


def parts_of(config: ResolvedConfig, blocks: list[list[Spec]], joined: set[int]) -> list[range]:
    """Divide a stage's blocks into the parts of its backward: from the last, until a bucket is full.

    With ZeRO-3 each block is a part: it is what is fetched and dropped. Where gradients are lent, a
    block that fills a bucket, such as the embedding, takes no smaller ones with it: under these the
    head is reduced, and the embedding's gradient lies in the head's memory. For the same reason a
    tied embedding counts where each of its uses is reduced with its part.
    joined: blocks in the same part as the block before them.
    """
    itemsize = 8 if config.precision.compute == "fp64" else 4  # of gradients
    limit = config.comm.bucket_mb * 2**20 if config.parallel.zero < 3 else 0
    each_use = config.parallel.reduce == "microbatch"
    sizes = [itemsize * sum(spec.numel for spec in block if each_use or not spec.tied) for block in blocks]
    parts = []
    end = len(blocks)
    size = 0
    for index in reversed(range(len(blocks))):
        if lends_gradients(config.parallel) and sizes[index] >= limit and size and index + 1 not in joined:
            parts.append(range(index + 1, end))
            end, size = index + 1, 0
        size += sizes[index]
        if (size >= limit and index not in joined) or index == 0:
            parts.append(range(index, end))
            end, size = index, 0
    return parts


def buckets_of(
    config: ResolvedConfig, blocks: list[list[Spec]], parts: list[range], copies: int = 1
) -> list[BucketPlan]:
    """Return the buckets of a stage.

    Those of the parts; one of what is counted (plan/division/domains.py), for its few numbers are
    padded to blocks of every shard; the tied embedding's; those of copies that have part of a
    gradient each.

    The last are norms with sequence parallelism and repeated key-value heads, whose copies are
    summed over the tensor-parallel axis. Where the pipeline has two copies of the model, each
    bucket is then summed with its mirror image. The tied embedding's axis joins both: its uses are
    added first, unless sums over microbatches and data ranks are one tree, or each microbatch is
    reduced. Then each use is a bucket, so that no gradient is whole from the head's backward to the
    embedding's.
    """
    part_of = {block: number for number, part in enumerate(parts) for block in part}
    placed = [(spec, part_of[number]) for number, block in enumerate(blocks) for spec in block]
    mirror = (MIRROR,) if copies == 2 else ()
    return [
        *_part_buckets(config, placed, len(parts), mirror),
        *_counted_buckets(config, placed, mirror),
        *_tied_buckets(config, [(spec, part) for spec, part in placed if spec.tied]),
        *_partial_buckets(config, [(spec, part) for spec, part in placed if spec.partial], mirror),
    ]


def _part_buckets(
    config: ResolvedConfig, placed: Placed, num_parts: int, mirror: tuple[str, ...]
) -> Iterator[BucketPlan]:
    """Yield a bucket of each part and domain; a part without parameters of its own has one, too."""
    alone = [(spec, part) for spec, part in placed if not spec.partial and not spec.tied]
    plain = [(spec, part) for spec, part in alone if domain_of(config, spec) != COUNTED]
    for domain in dict.fromkeys((DENSE, *(spec.domain for spec, _ in plain))):
        for number in range(num_parts):
            specs = tuple(spec for spec, part in plain if part == number and spec.domain == domain)
            if specs or domain == DENSE:
                yield BucketPlan(specs, (number,), mirror, domain=domain)


def _counted_buckets(config: ResolvedConfig, placed: Placed, mirror: tuple[str, ...]) -> Iterator[BucketPlan]:
    counted = [(spec, n) for spec, n in placed if not spec.partial and domain_of(config, spec) == COUNTED]
    if counted:
        yield _bucket(counted, mirror, COUNTED)


def _tied_buckets(config: ResolvedConfig, tied: Placed) -> Iterator[BucketPlan]:
    """Yield the bucket of the tied embedding, or one for each of its uses."""
    if not tied:
        return
    tree = config.numerics.reproducible == "layout"
    per_microbatch = config.parallel.reduce == "microbatch"
    over, then = ((), (TIED,)) if tree or per_microbatch else ((TIED,), ())
    uses = [part for _, part in tied]
    use_groups = [[part] * uses.count(part) for part in dict.fromkeys(uses)] if per_microbatch else [uses]
    for parts in use_groups:
        yield BucketPlan((tied[0][0],), tuple(parts), over, then)


def _partial_buckets(
    config: ResolvedConfig, partial: Placed, mirror: tuple[str, ...]
) -> Iterator[BucketPlan]:
    """Yield a bucket of each kind of copies that have part of a gradient each."""
    kinds: dict[tuple[int, str, str], Placed] = {}
    for spec, part in partial:
        if spec.over:
            kinds.setdefault((spec.copies, spec.over, domain_of(config, spec)), []).append((spec, part))
    for (_, over, domain), placed in sorted(kinds.items()):
        yield _bucket(placed, (over, *mirror), domain)


def _bucket(placed: Placed, over: tuple[str, ...], domain: str) -> BucketPlan:
    parts = tuple(sorted({part for _, part in placed}))
    return BucketPlan(tuple(spec for spec, _ in placed), parts, over, domain=domain)
