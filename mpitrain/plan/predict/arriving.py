"""What sums of gradients over data ranks hold besides the buffers: their copies in 16 bits, and what arrives.

    copy    of a whole gradient, rounded to what is sent (precision.reduce)
    shard   of the sum, where it isn't written to its place: it is rounded, or is added to those of
            the microbatches before

They are there from REDUCE until the sum has been taken over. No more than TOGETHER sums that have
any are under way on a rank (actor/reductions.py), so this doesn't grow with the number of buckets.
"""

from mpitrain.config import Config
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.division.domains import itemsize_on_the_wire
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import Buffer, held_by
from mpitrain.plan.predict.pool_sizes import alone_in

TOGETHER = 3  # sums of buckets that are under way


def arriving_bytes(plan: Plan, rank: int) -> int:
    """Return the most bytes that the sums of a pipeline rank's program hold at once, by their order in it."""
    alone = alone_in(plan)
    stages = held_by(plan, rank)
    sizes = []
    for action in plan.training.ranks[rank]:
        if action.kind != "REDUCE":
            continue
        bucket = stages[action.stage].buckets[action.index]
        domain = bucket.plan.domain
        if domain not in alone:
            reduced = bucket.gradients[:1] if bucket.plan.over else bucket.gradients
            sizes += [beside(plan.config, gradient, domain) for gradient in reduced]
    return max((sum(sizes[at : at + TOGETHER]) for at in range(len(sizes))), default=0)


def beside(config: Config, gradient: Buffer, domain: str) -> int:
    """Return the bytes that one sum holds besides the buffers of its gradient."""
    _, wide = itemsizes_of(config)
    width = itemsize_on_the_wire(config, domain)
    rounded = width < wide
    each = config.parallel.reduce == "microbatch"
    copy = gradient.length * width if rounded else 0
    if each and config.parallel.zero == 0:  # there are no shards
        return copy
    return copy + (gradient.kept(divided=True) * width if rounded or each else 0)
