"""What a rank holds, read from what it has allocated; what it was to hold says plan/predict/memory.py."""

from collections.abc import Sequence

from mpitrain.actor.actor import Actor
from mpitrain.actor.memory_meter import Watch
from mpitrain.parallel.zero.shards import Gradient
from mpitrain.plan.predict.memory import MemoryUsage


def measure(actor: Actor, watch: Watch) -> MemoryUsage:
    """Return what this rank has allocated, and the most that its microbatches held when watched.

    What a computation works with between two items of a block isn't in it.
    """
    buckets = [bucket for stage in actor.stages.values() for bucket in stage.state.buckets]
    weights = [b.weights for b in buckets if b.owned]
    kept = sum(w.num_bytes for w in weights)
    moments = sum(x.nbytes for piece in actor.gradients.pieces for _, x in actor.optimizer.moments(piece))
    zero_groups = actor.zero_groups.values()
    host = _activations_on_host(actor)
    usage = MemoryUsage(
        weights=kept,
        gradients=_kept([gradient for b in buckets for gradient in b.gradients]),
        moments=moments,
        gathered=sum(zero_group.weights.num_bytes for zero_group in zero_groups),
        unreduced=sum(zero_group.gradients.num_bytes for zero_group in zero_groups),
        activations=watch.peak,
        recomputed=watch.inside - watch.peak,
        messages=sum(axis.num_bytes for axis in actor.mesh.axes.values()) + actor.gradients.most_bytes,
        host=host,
    )
    if actor.config.memory.offload in ("optimizer", "all"):
        host += moments + actor.optimizer.num_bytes + sum(w.host_bytes for w in weights)
        return usage._replace(moments=0, host=host)
    masters = sum(w.master.nbytes for w in weights if w.master is not w.shard)
    return usage._replace(weights=kept + masters)


def _activations_on_host(actor: Actor) -> int:
    stores = (stage.offload_store for stage in actor.stages.values())
    return sum(store.host.num_bytes for store in stores if store is not None)


def _kept(gradients: Sequence[Gradient]) -> int:
    return sum((each.shard if each.whole is None else each.whole).nbytes for each in gradients)
