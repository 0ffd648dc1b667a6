"""What a rank holds, read from what it has allocated; what it was to hold says layout/memory.py."""

from collections.abc import Sequence

from mpitrain.actor.actor import Actor
from mpitrain.actor.memory_meter import Watch
from mpitrain.layout.memory import MemoryUsage
from mpitrain.parallel.zero.shards import Gradient


def measure(actor: Actor, watch: Watch) -> MemoryUsage:
    """Return what this rank has allocated, and what its microbatches held at most in the step that
    was watched.

    What a computation works with between two items of a block nobody sees: it is no part of this.
    """
    buckets = [bucket for stage in actor.stages.values() for bucket in stage.state.buckets]
    weights = [b.weights for b in buckets if b.owned]
    gradients = [gradient for b in buckets for gradient in b.gradients]
    kept = sum(w.num_bytes for w in weights)
    moments = sum(x.nbytes for piece in actor.gradients.pieces for _, x in actor.optimizer.moments(piece))
    gathered = sum(sharding.weights.num_bytes for sharding in actor.shardings.values())
    unreduced = sum(sharding.gradients.num_bytes for sharding in actor.shardings.values())
    messages = sum(axis.num_bytes for axis in actor.mesh.axes.values())
    recomputed = watch.inside - watch.peak
    host = sum(stage.shelves.host.num_bytes for stage in actor.stages.values() if stage.shelves is not None)
    if actor.config.memory.offload in ("optimizer", "all"):
        host += moments + actor.optimizer.num_bytes + sum(w.host_bytes for w in weights)
        return MemoryUsage(
            kept, _kept(gradients), 0, gathered, unreduced, watch.peak, recomputed, 0, messages, host
        )
    masters = sum(w.master.nbytes for w in weights if w.master is not w.shard)
    return MemoryUsage(
        kept + masters,
        _kept(gradients),
        moments,
        gathered,
        unreduced,
        watch.peak,
        recomputed,
        0,
        messages,
        host,
    )


def _kept(gradients: Sequence[Gradient]) -> int:
    return sum((each.shard if each.whole is None else each.whole).nbytes for each in gradients)
