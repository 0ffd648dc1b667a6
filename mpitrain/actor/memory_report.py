"""`mpitrain memory`: what each rank will hold, and after a run beside it what it held. Nothing is allocated for it.

    weights       of the bucket buffers, padding included, and with 16-bit types their fp32 masters
    gradients     the same; with ZeRO-2 and 3 the shards
    moments       of the optimiser, without padding
    lent          buffers that ZeRO-2 and 3, and sums in a tree, borrow (lending.py)
    activations   what microbatches leave behind at the peak of the schedule (layout/activations.py; measured: memory_meter.py)
    host          what is offloaded to host memory: masters, moments, gradients, and 16-bit weights on their way back; activations, in
                  buffers that each stage keeps for the next step (16-bit ones but for norms' factors, which are fp32)
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.actor.actor import Actor
from mpitrain.actor.lending import most_added_to, most_fetched
from mpitrain.actor.memory_meter import Watch
from mpitrain.config import Config
from mpitrain.layout.activations import Activations
from mpitrain.layout.buckets import Bucket, Layout, layout_of
from mpitrain.layout.parameters import Spec, itemsizes_of
from mpitrain.layout.plan import Plan
from mpitrain.layout.text import aligned
from mpitrain.optim.offload import Offloaded
from mpitrain.parallel.zero.shards import Gradient, Sharding, Weights
from mpitrain.schedules.actions import Action
from mpitrain.schedules.table import Table

PARTS = ("weights", "gradients", "moments", "lent", "activations", "host")


class Usage(NamedTuple):
    """Bytes of one rank: on its device, and in host memory if that is another place or is treated as such."""

    weights: int
    gradients: int
    moments: int
    lent: int
    activations: int
    host: int = 0

    @property
    def on_device(self) -> int:
        return sum(self) - self.host


def measure(actor: Actor, watch: Watch) -> Usage:
    """Return what this rank has allocated, and what its microbatches held at most in the step that was watched."""
    buckets = [bucket for stage in actor.stages.values() for bucket in stage.state.buckets]
    weights, gradients = [b.weights for b in buckets if b.owned], [gradient for b in buckets for gradient in b.gradients]
    moments = sum(x.nbytes for piece in actor.gradients.pieces for _, x in actor.optimizer.moments(piece))
    lent = sum(pool.num_bytes for pool in (actor.sharding.weights, actor.sharding.gradients))
    host = sum(stage.shelves.host.num_bytes for stage in actor.stages.values() if stage.shelves is not None)
    if isinstance(actor.optimizer, Offloaded):
        host += moments + actor.optimizer.num_bytes + sum(w.host_bytes for w in weights)
        return Usage(_kept(weights), _kept(gradients), 0, lent, watch.peak, host)
    masters = sum(w.master.nbytes for w in weights if w.master is not w.shard)
    return Usage(_kept(weights) + masters, _kept(gradients), moments, lent, watch.peak, host)


def _kept(buffers: Sequence[Weights | Gradient]) -> int:
    return sum((buffer.shard if buffer.whole is None else buffer.whole).nbytes for buffer in buffers)


class _Buffer:
    """A flat buffer of a bucket, by the name under which lending.py looks at one."""

    def __init__(self, layout: Layout, itemsize: int):
        self.layout, self.kind = layout, (layout.length, itemsize)


class _Planned(NamedTuple):
    parts: tuple[int, ...]
    weights: _Buffer
    gradients: list[_Buffer]
    over: str | None
    owned: bool


class _Stage(NamedTuple):
    buckets: list[_Planned]


def predict(plan: Plan, shard: int | None = None) -> list[Usage]:
    """Return what a rank of each pipeline rank holds, the first of its tensor-parallel axis.

    shard: its part of a state that is divided; None: the one that holds most, for not all hold as much padding.
    """
    return [_usage(plan, rank, shard) for rank in range(plan.config.parallel.pp)]


def _usage(plan: Plan, rank: int, shard: int | None) -> Usage:
    config, table, training, evaluation = plan.config, plan.table, plan.training.ranks[rank], plan.evaluation.ranks[rank]
    parallel, narrow, wide = config.parallel, *itemsizes_of(config)
    size = parallel.cp * (parallel.dp_shard or parallel.dp) if parallel.zero else 1
    sharding = Sharding(parallel.zero, tree=config.numerics.reproducible == "layout")
    stages = _stages(plan, table.chunks[rank], size, narrow, wide)
    buckets = [bucket for stage in stages.values() for bucket in stage.buckets]
    owned = [bucket for bucket in buckets if bucket.owned]
    lengths = [(b.weights.layout.length, b.weights.layout.length // size) for b in owned]
    weights = sum(share if parallel.zero == 3 else whole for whole, share in lengths) * narrow
    masters = sum(share for _, share in lengths) * wide
    grads = [gradient.layout.length // (size if parallel.zero >= 2 else 1) for bucket in buckets for gradient in bucket.gradients]
    offloaded = config.memory.offload in ("optimizer", "all")
    shards = range(size) if shard is None else (shard,)
    moments, arriving = max((_updated(config, owned, each) for each in shards), key=sum if offloaded else None)
    formulas = {stage: Activations(plan.stage(stage), plan.sizes) for stage in table.chunks[rank]}
    lent, held = _lent(sharding, stages, table, training, evaluation), _activations(training, table, formulas)
    host = _put_away(training, table, formulas)
    if offloaded:
        leaving = 0 if narrow == wide else masters // wide * narrow
        host += masters + leaving + moments + arriving
        return Usage(weights, sum(grads) * wide, 0, lent, held, host)
    return Usage(weights + (masters if narrow != wide else 0), sum(grads) * wide, moments, lent, held, host)


def _updated(config: Config, buckets: Sequence[_Planned], shard: int) -> tuple[int, int]:
    """Return the bytes of what is updated in a shard of the buckets, without padding: moments, and gradients on the host."""
    _, wide = itemsizes_of(config)
    runs = [(spec, end - begin) for bucket in buckets for spec, begin, end in bucket.weights.layout.runs(shard)]
    moments = sum(count * _moments(config, spec) for spec, count in runs) * (2 if config.optimizer.moments == "bf16" else wide)
    return moments, sum(count for _, count in runs) * wide


def _lent(sharding: Sharding, stages: dict[int, _Stage], table: Table, training: Sequence[Action], evaluation: Sequence[Action]) -> int:
    """Return the bytes that lending.reserve allocates."""
    total = 0
    if sharding.stage == 3:
        fetched = [most_fetched(instructions, stages) for instructions in (training, evaluation)]
        total += sum(length * itemsize * count for (length, itemsize), count in (fetched[0] | fetched[1]).items())
    if sharding.stage >= 2 or sharding.tree:
        most = most_added_to(training, stages, table, sharding)
        total += sum(length * itemsize * (count + (sharding.stage >= 2)) for (length, itemsize), count in most.items())
    return total


def _stages(plan: Plan, numbers: Sequence[int], size: int, narrow: int, wide: int) -> dict[int, _Stage]:
    stages: dict[int, _Stage] = {}
    embedding: _Buffer | None = None
    for number in numbers:
        planned = []
        stage = plan.stage(number)
        for bucket in stage.buckets(stage.shard(0)):
            shared = embedding if bucket.over == "tied" else None
            planned.append(_planned(bucket, size, narrow, wide, shared))
            if bucket.over == "tied":
                embedding = planned[-1].weights
        stages[number] = _Stage(planned)
    return stages


def _planned(bucket: Bucket, size: int, narrow: int, wide: int, shared: _Buffer | None) -> _Planned:
    layout = layout_of(bucket.specs, size)
    uses = len(bucket.parts) if bucket.over == "tied" else 1
    gradients = [_Buffer(layout, wide) for _ in range(uses)]
    return _Planned(bucket.parts, shared or _Buffer(layout, narrow), gradients, bucket.over, shared is None)


def _moments(config: Config, spec: Spec) -> int:
    """Return how many numbers the optimiser keeps of one of a parameter's."""
    if config.optimizer.name == "sgd":
        return 1 if config.optimizer.momentum else 0
    return 1 if config.optimizer.name == "muon" and spec.group == "matrix" else 2


def _activations(instructions: Sequence[Action], table: Table, stages: dict[int, Activations]) -> int:
    """Return the most that the microbatches of a rank hold at once, between instructions; a pair is one."""
    held, returned, most = Counter[tuple[int, int]](), Counter[tuple[int, int]](), 0
    last = {action[:3]: position for position, action in enumerate(instructions)}
    for position, action in enumerate(instructions):
        kind, index, stage = action[:3]
        done = last[action[:3]] == position
        if kind == "F":
            held[index, stage] = stages[stage].kept(index % table.segments)
        elif kind == "I" and done:
            held[index, stage] = stages[stage].left()
        elif kind in ("B", "W") and done:
            del held[index, stage]
            if table.segments > 1:
                microbatch, segment = divmod(index, table.segments)
                returned[microbatch, stage] = stages[stage].returned(segment)
        if position == 0 or instructions[position - 1].kind != "PAIR":
            most = max(most, held.total() + returned.total())
    return most


def _put_away(instructions: Sequence[Action], table: Table, stages: dict[int, Activations]) -> int:
    """Return the bytes that offloaded activations take in host memory, from their forward to the end of their B or I.

    A buffer is used again for what has the same length: in all segments that is all but keys and values, which are longer in each.
    """
    last = {action[:3]: action for action in instructions if action.kind in ("B", "I")}
    held, most, together = Counter[tuple[int, int]](), Counter[tuple[int, int]](), Counter[int]()
    for action in instructions:
        if action.kind == "F" and not action.part:
            held[action.stage, action.index % table.segments] += 1
            most |= held
            together[action.stage] = max(together[action.stage], sum(n for (stage, _), n in held.items() if stage == action.stage))
        elif last.get(action[:3]) == action:
            held[action.stage, action.index % table.segments] -= 1
    keys = {stage: stages[stage].on_host(1) - stages[stage].on_host(0) for stage in together}
    total = sum((stages[stage].on_host(0) - keys[stage]) * count for stage, count in together.items())
    return total + sum(keys[stage] * (segment + 1) * count for (stage, segment), count in most.items())


def table_of_usage(usages: Sequence[Usage]) -> str:
    """Draw what each pipeline rank holds, in MB of 10**6 bytes: on its device together, and in host memory."""
    rows = [("rank of pp", *PARTS[:-1], "together", PARTS[-1])]
    for rank, usage in enumerate(usages):
        rows.append((str(rank), *(f"{part / 1e6:.2f}" for part in (*usage[:-1], usage.on_device, usage.host))))
    return aligned(rows)


def compare(predicted: Usage, measured: Usage) -> str:
    """Say in one line what a rank was to hold, and what it has."""
    parts = [f"{name} {a / 1e6:.2f} / {b / 1e6:.2f}" for name, a, b in zip(PARTS, predicted, measured) if a or b]
    return f"memory of rank 0, MB predicted / measured: {', '.join(parts)}"
