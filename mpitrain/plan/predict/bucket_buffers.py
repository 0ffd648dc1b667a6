"""The buckets that a rank will hold: their buffers, before there is memory for them."""

from typing import NamedTuple

from mpitrain.plan.division.buckets import BucketMap, BucketPlan, map_bucket
from mpitrain.plan.division.domains import DOMAINS
from mpitrain.plan.plan import Plan


class Buffer:
    """A flat buffer of a bucket. Two are the same only if they are the same object."""

    def __init__(self, mapped: BucketMap):
        self.map = mapped

    @property
    def length(self) -> int:
        """Elements."""
        return self.map.length

    def kept(self, *, divided: bool) -> int:
        """Return the elements that stay on a rank."""
        return self.length // (self.map.num_shards if divided else 1)


class HeldBucket(NamedTuple):
    """A bucket of a stage.

    owned: whether its weights belong to this stage; only a tied embedding's can be another's.
    """

    plan: BucketPlan
    weights: Buffer
    gradients: list[Buffer]
    owned: bool


class HeldStage(NamedTuple):
    """The buckets of a stage."""

    buckets: list[HeldBucket]


FIRST = (0, 0)  # of the axes tp and experts


def held_by(plan: Plan, rank: int, place: tuple[int, int] = FIRST) -> dict[int, HeldStage]:
    """Return the stages of a pipeline rank, by their number in the table.

    place: ranks on the axes tp and experts; what doesn't divide, such as a vocabulary, makes
    buffers of other lengths on some of these.
    """
    stages: dict[int, HeldStage] = {}
    embedding: Buffer | None = None
    for number in plan.table.chunks[rank]:
        stage = plan.stage(number)
        buckets = []
        for bucket in stage.buckets(stage.shard(*place)):
            mapped = map_bucket(bucket.specs, DOMAINS[bucket.domain].num_shards(plan.config))
            shared = embedding if bucket.tied else None
            gradients = [Buffer(mapped) for _ in range(len(bucket.parts) if bucket.tied else 1)]
            buckets.append(HeldBucket(bucket, shared or Buffer(mapped), gradients, owned=shared is None))
            embedding = buckets[-1].weights if bucket.tied else embedding
        stages[number] = HeldStage(buckets)
    return stages


def buckets_of(plan: Plan, rank: int) -> list[HeldBucket]:
    """Return the buckets of all stages of a pipeline rank."""
    return [bucket for stage in held_by(plan, rank).values() for bucket in stage.buckets]
