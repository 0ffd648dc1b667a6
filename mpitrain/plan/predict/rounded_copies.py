"""What sums of gradients over data ranks hold besides the buffers: copies in 16 bits (precision.reduce),
or the subtrees of other ranks (actor/reductions.py).

A copy is there from REDUCE until the sum, which arrives in it, has been taken over. No more than
TOGETHER sums that have one are under way on a rank (actor/reductions.py). Without rounding a sum
arrives in the buffer itself.
"""

from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.division.domains import itemsize_on_the_wire, lends_gradients
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import Buffer, held_by
from mpitrain.plan.predict.pool_sizes import alone_in, given_back, reductions_of

TOGETHER = 3  # sums of buckets that are under way


def copies_sent(plan: Plan, rank: int) -> int:
    """Return the most bytes that the sums of a pipeline rank's program hold at once."""
    if lends_gradients(plan.config.parallel) or not plan.division.is_even:
        # those that buffers are waited for are over
        reductions = reductions_of(plan, rank)
        sizes = [copy_bytes(plan, gradient, domain) for gradient, domain, _ in reductions]
        begins = [max(num_over, at + 1 - TOGETHER) for at, (_, _, num_over) in enumerate(reductions)]
    else:
        sizes = _reduced_once(plan, rank)
        begins = [max(0, at + 1 - TOGETHER) for at in range(len(sizes))]
    return max((sum(sizes[begin : at + 1]) for at, begin in enumerate(begins)), default=0)


def _reduced_once(plan: Plan, rank: int) -> list[int]:
    """Return what each sum holds where gradients stay whole, in the order of the program."""
    alone = alone_in(plan)
    stages = held_by(plan, rank)
    sizes = []
    for action in (each for each in plan.lowered_training.ranks[rank] if each.kind == "REDUCE"):
        domain = stages[action.stage].buckets[action.index].plan.domain
        if domain not in alone:
            reduced = given_back(action, stages, lends=True)
            sizes += [copy_bytes(plan, gradient, domain) for gradient in reduced]
    return sizes


def copy_bytes(plan: Plan, gradient: Buffer, domain: str) -> int:
    """Return the bytes of the copy that a sum sends, or of what arrives; 0 if it sends the buffer."""
    _, wide = itemsizes_of(plan.config)
    if not plan.division.is_even:
        return gradient.length * wide * plan.division.most_subtrees
    width = itemsize_on_the_wire(plan.config, domain)
    return gradient.length * width if width < wide else 0
