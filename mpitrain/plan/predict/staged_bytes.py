"""Pinned host memory through which messages of a GPU's buffers go where MPI can't read these.

torch rounds each block up to a power of two, gives none back to the system, and uses it again for
buffers of its size. So what counts is how many of a size are on their way at once: at most all
gradients of a rank, and after them all weights. The messages of other axes are small against those.
Measured on one NVIDIA H200 by two ranks of llama3.2-1b with ZeRO-1, 2026-11-26: 10.0 GB; from here:
8.1, and 0.8 GB by which the snapshot is rounded up.
"""

from collections import Counter

from mpitrain.plan.division.domains import (
    domains_of,
    drops_weights,
    itemsize_of_weights,
    itemsize_on_the_wire,
)
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import HeldBucket, buckets_of


def staged_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of pinned memory that a rank of one pipeline rank takes for messages of data ranks.

    None is taken where comm.device = "direct", and on a CPU; that is for the caller to know.
    """
    summed: Counter[int] = Counter()
    fetched: Counter[int] = Counter()
    for bucket in buckets_of(plan, rank):
        summed += _summed_sizes(plan, bucket)
        mapped, domain = bucket.weights.map, bucket.plan.domain
        if bucket.owned and mapped.num_shards > 1 and not drops_weights(plan.config, domain):
            # the block of its weights, which all ranks have after an update
            fetched[_block(mapped.length * itemsize_of_weights(plan.config, domain))] += 1
    return sum(block * count for block, count in (summed | fetched).items())


def _summed_sizes(plan: Plan, bucket: HeldBucket) -> Counter[int]:
    """Return the blocks of the sum of a bucket's gradient, by size: in shards, and of each shard."""
    domain = domains_of(plan.config)[bucket.plan.domain]
    mapped = bucket.weights.map
    whole = mapped.length * itemsize_on_the_wire(plan.config, bucket.plan.domain)
    shard = whole // mapped.num_shards
    sizes = [whole, shard] if mapped.num_shards > 1 else []
    sizes += [shard] if len(plan.axes.of(0)[domain.replicate]) > 1 else []
    return Counter(map(_block, sizes))


def _block(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
