"""What each rank will hold, found without allocating anything: the rows of `mpitrain memory`.

weights       of the bucket buffers, padding included, and with 16-bit types their fp32 masters
gradients     the same; with ZeRO-2 and 3 the shards
moments       of the optimiser, without padding
gathered      weights that ZeRO-3 has whole for a while, an arena of them (pool_sizes.py)
unreduced     gradients that ZeRO-2 and 3 have whole until they are reduced, or a sum in a tree
              until it is complete
activations   what microbatches leave behind at the peak of the schedule (plan/activations/kept.py;
              measured: actor/memory_meter.py)
recomputed    what is made again for a backward then, on top of that (plan/activations/transients.py)
working       what the forward or backward of one block takes besides
messages      windows, scratch, what travels between pipeline ranks (message_memory.py)
host          what is offloaded: masters, moments, gradients, and 16-bit weights on their way back;
              activations, in buffers that each stage keeps for the next step (16-bit ones but for
              norms' factors, which are fp32)
snapshot      masters and moments in host memory, from which a thread saves (snapshot_bytes.py)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpitrain.plan.activations.kept import Activations
from mpitrain.plan.activations.peak import peak_of, put_away
from mpitrain.plan.declared.optimizers import GROUPS, num_moments
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.domains import domains_of, drops_weights, itemsize_of_weights, lends_gradients
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import HeldBucket, buckets_of
from mpitrain.plan.predict.message_memory import message_bytes
from mpitrain.plan.predict.pool_sizes import needed_by
from mpitrain.plan.settings.pipeline_table import turn_of

SNAPSHOT = "snapshot"


class MemoryUsage(NamedTuple):
    """Bytes of one rank: on its device, and in host memory if that is another place or is treated as such."""

    weights: int
    gradients: int
    moments: int
    gathered: int
    unreduced: int
    activations: int
    recomputed: int = 0
    working: int = 0
    messages: int = 0
    host: int = 0

    @property
    def lent(self) -> int:
        """What is taken and given back within a step."""
        return self.gathered + self.unreduced

    @property
    def computed(self) -> int:
        """What microbatches keep, and what a computation takes."""
        return self.activations + self.recomputed + self.working

    @property
    def on_device(self) -> int:
        return sum(self) - self.host


PARTS = MemoryUsage._fields


def predict(plan: Plan, shards: Mapping[str, int] | None = None, on_gpu: bool = False) -> list[MemoryUsage]:
    """Return what a rank of each pipeline rank holds, the first of its tensor-parallel axis.

    shards: its part of a state that is divided, by domain; None: the one that holds most, for
    padding differs. on_gpu: it computes on one, whether or not run.device asks for that.
    """
    return [predict_rank(plan, rank, shards, on_gpu) for rank in range(plan.config.parallel.pp)]


def predict_rank(
    plan: Plan, rank: int, shards: Mapping[str, int] | None = None, on_gpu: bool = False
) -> MemoryUsage:
    """Return what a rank of one pipeline rank holds, as predict() does of all.

    As few microbatches as show it are played. Where ranks hold all, one turn of the pipeline more
    shows what each adds.
    """
    few = plan.shortest
    held = _played(few, rank, shards, on_gpu)
    if few is plan or not plan.holds_all:
        return held
    turn = turn_of(plan.config)
    more = _played(few.with_microbatches(few.num_microbatches + turn), rank, shards, on_gpu)
    turns = (plan.num_microbatches - few.num_microbatches) // turn
    return MemoryUsage(*(old + (new - old) * turns for old, new in zip(held, more)))


def _played(plan: Plan, rank: int, shards: Mapping[str, int] | None, on_gpu: bool) -> MemoryUsage:
    """Return what a rank holds of the microbatches of a step."""
    config = plan.config
    narrow, wide = itemsizes_of(config)
    buckets = buckets_of(plan, rank)
    owned = [bucket for bucket in buckets if bucket.owned]
    weights = sum(_weights_kept(config, bucket) for bucket in owned)
    # with masters beside them
    rounded = [b for b in owned if itemsize_of_weights(config, b.plan.domain) < wide]
    divided = lends_gradients(config.parallel)
    grads = sum(gradient.kept(divided=divided) for b in buckets for gradient in b.gradients) * wide
    offloaded = config.memory.offload in ("optimizer", "all")
    moments = _moments_at_most(config, owned, shards, offloaded)
    played = plan.lowered_training.ranks[rank], plan.table, activations_of(plan, rank, on_gpu)
    peak, host = peak_of(*played), put_away(*played)
    lent = lent_bytes(plan, rank)
    messages = message_bytes(plan, rank)
    if offloaded:
        host += _divided(owned) * wide + _divided(rounded) * narrow + moments
        return MemoryUsage(weights, grads, 0, *lent, *peak, messages, host)
    return MemoryUsage(weights + _divided(rounded) * wide, grads, moments, *lent, *peak, messages, host)


def activations_of(plan: Plan, rank: int, on_gpu: bool = False) -> dict[int, Activations]:
    """Return what microbatches keep of the stages of a pipeline rank, by their number in the table."""
    sizes = replace(plan.sizes, on_gpu=True) if on_gpu else plan.sizes
    return {stage: Activations(plan.stage(stage), sizes) for stage in plan.table.chunks[rank]}


def weights_of_rank(plan: Plan, rank: int) -> int:
    """Return the bytes of weights that stay on a rank of a pipeline rank, without masters."""
    return sum(_weights_kept(plan.config, bucket) for bucket in buckets_of(plan, rank) if bucket.owned)


def _divided(buckets: Sequence[HeldBucket]) -> int:
    """Return how many numbers of their weights a rank updates."""
    return sum(bucket.weights.kept(divided=True) for bucket in buckets)


def lent_bytes(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the bytes of gathered weights and of unreduced gradients."""
    _, wide = itemsizes_of(plan.config)
    borrowed = needed_by(plan, rank)
    gathered = sum(
        arena.length * itemsize_of_weights(plan.config, domain) for domain, arena in borrowed.weights.items()
    )
    return gathered, sum(arena.length for arena in borrowed.gradients.values()) * wide


def _weights_kept(config: ResolvedConfig, bucket: HeldBucket) -> int:
    domain = bucket.plan.domain
    return bucket.weights.kept(divided=drops_weights(config, domain)) * itemsize_of_weights(config, domain)


def _moments_at_most(
    config: ResolvedConfig, owned: Sequence[HeldBucket], shards: Mapping[str, int] | None, offloaded: bool
) -> int:
    """Return the bytes of moments, without padding; offloaded: with the gradients that arrive beside them.

    shards: as predict() takes them, of each domain apart.
    """
    gradient = itemsizes_of(config)[1] if offloaded else 0
    of_moments = {group: num_moments(config.optimizer, group) * moment_bytes(config) for group in GROUPS}
    total = 0
    for name, domain in domains_of(config).items():
        held = np.zeros(domain.num_shards(config), np.int64)
        for mapped in (bucket.weights.map for bucket in owned if bucket.plan.domain == name):
            held += mapped.by_shard(
                [of_moments.get(spec.group, 0) + gradient if spec.updated else 0 for spec in mapped.specs]
            )
        total += int(held.max() if shards is None else held[shards[name]])
    return total


def moment_bytes(config: ResolvedConfig) -> int:
    """Return the bytes of one number of a moment."""
    return 2 if config.optimizer.moments == "bf16" else itemsizes_of(config)[1]
