"""What data ranks exchange in a step, how long links take, and what follows for `parallel.gather` and
`pipeline.tail`.

Both are settled only where they are left open and links between nodes have been measured. Seconds
are those of a rank of the pipeline rank that needs most:

    gather  "step", if fetching weights for each use takes longer than all that is computed, and
            whole weights fit into memory
    tail    the fewest backwards that take twice as long as the reductions they hide, and that fit
            into memory; at most four, and four where weights are fetched for each use: once for all
            of them

A rank computes at half of its peak, as a guess: what is chosen changes the time of a step, and no
bit of what it computes.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpitrain.comm.base.wire import sent_bytes
from mpitrain.plan.division.domains import domains_of, gather_of, itemsize_of_weights, itemsize_on_the_wire
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import HeldBucket, buckets_of, held_by
from mpitrain.schedules.lowering.lower import walks_together

SHARE_OF_PEAK = 0.5
MOST_TAIL = 4  # microbatches in memory
ROOM = 2.0  # by how much what hides reductions is longer than they are said to be
BACKWARD = 2 / 3  # of what a microbatch computes


class Exchanged(NamedTuple):
    """Bytes that a rank sends in a step over each axis, or reads."""

    weights: Counter[str]
    gradients: Counter[str]


class Took(NamedTuple):
    """Seconds of a step: for each part of what is exchanged, and for what is computed."""

    weights: float
    gradients: float
    computing: float

    @property
    def exchanging(self) -> float:
        return self.weights + self.gradients


class Machine(NamedTuple):
    """What was measured.

    links: bytes/s of the slowest link of each axis.
    flops: the peak of one rank, FLOP/s.
    """

    links: Mapping[str, float]
    flops: float


def axes_between(plan: Plan) -> tuple[str, ...]:
    """Return the axes of data ranks on which something travels."""
    names = dict.fromkeys(
        name for domain in domains_of(plan.config).values() for name in (domain.shard, domain.replicate)
    )
    return tuple(name for name in names if plan.axes.carried[name].operations)


def left_open(plan: Plan) -> tuple[str, ...]:
    """Return the keys that nobody has set, where they matter: data ranks exchange something."""
    keys = {"parallel.gather": _gather_is_open(plan), "pipeline.tail": _tail_is_open(plan)}
    return tuple(key for key, is_open in keys.items() if is_open) if axes_between(plan) else ()


def exchanged(plan: Plan, rank: int) -> Exchanged:
    """Return what a rank sends for its weights and gradients, the sums of scattered copies not counted."""
    stages = held_by(plan, rank)
    weights = Counter[str]()
    gradients = Counter[str]()
    for action in plan.training.ranks[rank]:
        if action.kind == "GATHER":
            weights += _fetched(plan, stages[action.stage].buckets[action.index])
        elif action.kind == "REDUCE":
            gradients += _reduced(plan, stages[action.stage].buckets[action.index])
        elif action.kind == "SPREAD":
            for bucket in (each for each in buckets_of(plan, rank) if each.owned):
                weights += _fetched(plan, bucket)
    return Exchanged(weights, gradients)


def took(plan: Plan, machine: Machine) -> Took:
    """Return the seconds of the pipeline rank whose exchange takes longest."""
    exchanges = [exchanged(plan, rank) for rank in range(plan.config.parallel.pp)]
    weights, gradients = max(
        ((_seconds(e.weights, machine), _seconds(e.gradients, machine)) for e in exchanges), key=sum
    )
    tokens = plan.config.batch.global_ * plan.config.data.sequence / plan.axes.grid.size
    return Took(weights, gradients, plan.flops_per_token() * tokens / (SHARE_OF_PEAK * machine.flops))


def choose(plan: Plan, machine: Machine, fits: Callable[[Plan], bool]) -> tuple[Plan, str]:
    """Return the plan with what was left open settled, and why, in lines for the user.

    fits: whether a plan fits into memory; it is asked alike on all ranks.
    """
    times = took(plan, machine)
    slowest = min(machine.links, key=machine.links.__getitem__)
    lines = [
        f"exchange of data ranks, a step: weights {_shown(times.weights)}, gradients "
        f"{_shown(times.gradients)}, axis {slowest} at {machine.links[slowest] / 1e9:.2g} GB/s; "
        f"computing {_shown(times.computing)}, at half of the peak"
    ]
    if _gather_is_open(plan):
        plan, why = _with_gather(plan, times, machine, fits)
        lines.append(f"parallel.gather = {json.dumps(gather_of(plan.config.parallel))}: {why}")
    if _tail_is_open(plan):
        plan, why = _with_tail(plan, times, fits)
        lines.append(f"pipeline.tail = {plan.config.pipeline.tail or 1}: {why}")
    return plan, "\n".join(lines)


def _gather_is_open(plan: Plan) -> bool:
    return plan.config.parallel.zero == 3 and plan.config.parallel.gather == "auto"


def _tail_is_open(plan: Plan) -> bool:
    """Return whether several backwards can be walked together, and nobody has said how many."""
    config = plan.config
    is_open = config.pipeline.tail == 0 and config.parallel.reduce == "step"
    return is_open and walks_together(plan.training.table)


def _with_gather(plan: Plan, times: Took, machine: Machine, fits: Callable[[Plan], bool]) -> tuple[Plan, str]:
    """Return the plan with weights fetched for each use, as it is, or once; and why."""
    if times.exchanging <= times.computing:
        return plan, "what is fetched for each use travels while this rank computes"
    step = plan.with_values({"parallel.gather": "step"})
    once = _shown(took(step, machine).weights)
    if not fits(step):
        return plan, f"weights fetched once would take {once}, but whole ones don't fit into memory"
    return (
        step,
        f"weights are fetched once, in {once}, and kept over the step; fetched for each use they "
        f"take {_shown(times.weights)}",
    )


def _with_tail(plan: Plan, times: Took, fits: Callable[[Plan], bool]) -> tuple[Plan, str]:
    """Return the plan with as long a tail as is of use and fits, and why; with one of 1 it is as it was."""
    wanted = _least_tail(plan, times)
    why = "backwards that the reductions travel under"
    for tail in range(wanted, 1, -1):
        longer = plan.with_values({"pipeline.tail": tail})
        if fits(longer):
            return longer, why
        why = f"backwards that the reductions travel under; {wanted} don't fit into memory"
    return plan, why


def _least_tail(plan: Plan, times: Took) -> int:
    most = min(MOST_TAIL, plan.num_microbatches)
    if plan.config.parallel.zero == 3 and gather_of(plan.config.parallel) == "use":
        return most
    backward = BACKWARD * times.computing / plan.num_microbatches
    return min(most, max(1, math.ceil(ROOM * times.gradients / backward)))


def _fetched(plan: Plan, bucket: HeldBucket) -> Counter[str]:
    """Return what a rank sends so that all have a bucket's weights."""
    domain = domains_of(plan.config)[bucket.plan.domain]
    mapped = bucket.weights.map
    size = itemsize_of_weights(plan.config, bucket.plan.domain)
    return Counter({domain.shard: sent_bytes("all_gather", mapped.length * size, mapped.num_shards)})


def _reduced(plan: Plan, bucket: HeldBucket) -> Counter[str]:
    """Return what a rank sends to sum a bucket's gradient: in shards, and each shard over its replicas."""
    domain = domains_of(plan.config)[bucket.plan.domain]
    mapped = bucket.weights.map
    size = itemsize_on_the_wire(plan.config, bucket.plan.domain)
    shard = mapped.length // mapped.num_shards
    scattered = sent_bytes("reduce_scatter", mapped.length * size, mapped.num_shards)
    alike = len(plan.axes.of(0)[domain.replicate])
    return Counter({domain.shard: scattered, domain.replicate: sent_bytes("all_reduce", shard * size, alike)})


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _seconds(num_bytes: Mapping[str, int], machine: Machine) -> float:
    return sum(count / machine.links[name] for name, count in num_bytes.items() if count)
