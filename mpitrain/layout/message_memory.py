"""What a rank holds for its messages.

Windows of shared memory, scratch for sums, and what travels between pipeline ranks.

window  of each axis within a node whose ranks read one another's memory (comm/axis_operations.py);
        each
         rank's part is its own
scratch  of an axis that sums by messages: the copies of the own shard, as long as a bucket. Over
         several nodes the bucket is
           sorted by nodes first, and as long again (comm/levels.py); axes keep the two largest for
               the next sum
links      two receives posted ahead, and one send
"""

import math

from mpitrain.comm.axis_operations import WINDOW
from mpitrain.layout.bucket_buffers import held_by
from mpitrain.layout.domains import domains_of
from mpitrain.layout.parameters import itemsizes_of
from mpitrain.layout.plan import Plan

LINKS = 3  # activations or gradients of a microbatch under way


def message_bytes(plan: Plan, rank: int) -> int:
    """Return what a rank of a pipeline rank holds for messages."""
    narrow, _ = itemsizes_of(plan.config)
    links = LINKS * math.prod(plan.activation_shape()) * narrow if plan.config.parallel.pp > 1 else 0
    return window_bytes(plan) + _scratch(plan, rank) + links


def window_bytes(plan: Plan) -> int:
    """Return the shared memory of a rank's own windows."""
    transport = plan.config.comm.transport
    ranks = plan.axes.of(0)
    found = [name for name, carried in plan.axes.carried.items() if carried.needs_window(transport)]
    return WINDOW * sum(_has_window(plan, ranks[name]) for name in found)


def _has_window(plan: Plan, ranks) -> bool:
    """Whether an axis has a window: of its own within a node, or of its part of each node."""
    return len(ranks) > 1 and (_on_one_node(plan, ranks) or _neighbours(plan, ranks) > 1)


def _scratch(plan: Plan, rank: int) -> int:
    """Return the two largest buffers in which sums of gradients arrive, of each domain."""
    _, wide = itemsizes_of(plan.config)
    transport = plan.config.comm.transport
    total = 0
    buckets = [bucket for stage in held_by(plan, rank).values() for bucket in stage.buckets]
    for name, domain in domains_of(plan.config).items():
        ranks = plan.axes.of(0)[domain.shard]
        reads = transport in ("auto", "shared") and _on_one_node(plan, ranks)
        if len(ranks) == 1 or reads:
            continue
        lengths = sorted(bucket.weights.length for bucket in buckets if bucket.plan.domain == name)
        total += sum(lengths[-2:]) * wide
    return total


def _on_one_node(plan: Plan, ranks) -> bool:
    node = plan.config.comm.node_ranks
    return not node or len({rank // node for rank in ranks}) == 1


def _neighbours(plan: Plan, ranks) -> int:
    node = plan.config.comm.node_ranks
    return sum(rank // node == ranks[0] // node for rank in ranks) if node else len(ranks)
