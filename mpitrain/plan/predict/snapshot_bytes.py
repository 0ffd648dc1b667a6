"""What a rank copies to host memory: to save it beside the steps (run.save = "background"), each
element of the model by one rank; and to resume from it after a death (recovery.every), by two.
"""

from collections.abc import Collection, Mapping

from mpitrain.plan.declared.optimizers import num_moments
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.division.buckets import BucketMap
from mpitrain.plan.division.domains import domains_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import held_by
from mpitrain.plan.predict.memory import moment_bytes

GENERATIONS = 2  # the newest copy in memory, and the one before it while that is replaced
MARKS = 64  # bytes: two marks, and the length of the meta
META_BYTES = 1 << 20
ALIGNMENT = 64  # bytes: a cache line, at which each tensor of a copy in memory begins
DIGEST_BYTES = 64  # at the end of a copy that is sent


def copy_bytes(plan: Plan, rank: int, shards: Mapping[str, int] | None = None) -> int:
    """Return the bytes of the copy of a rank that saves, the first with its shard and along tp.

    shards: its part of a state that is divided, by domain; None: the one that is largest.
    """
    if plan.config.run.save == "blocking":
        return 0
    return _state_bytes(plan, rank, domains_of(plan.config), shards)


def sent_copy_bytes(plan: Plan) -> int:
    """Return the bytes that each rank sends to its partner at COPY, as many as the largest copy; 0: none."""
    names = plan.axes.unreplicated
    if not names:
        return 0
    ranks = range(plan.config.parallel.pp)
    return DIGEST_BYTES + max(_state_bytes(plan, rank, names, None, ALIGNMENT) for rank in ranks)


def memory_copy_bytes(plan: Plan, rank: int, shards: Mapping[str, int] | None = None) -> int:
    """Return the bytes of memory of the node that the copies of a rank take (recovery.every).

    Its own, and those that it keeps for a partner; of the ranks that copy all that they have.
    """
    if not plan.config.recovery.every:
        return 0
    sent = sent_copy_bytes(plan)
    others = [name for name in domains_of(plan.config) if name not in plan.axes.unreplicated]
    if sent:
        apart = [_state_bytes(plan, rank, [name], shards, ALIGNMENT) for name in others]
        return 2 * file_bytes(sent) + sum(file_bytes(num_bytes) for num_bytes in apart if num_bytes)
    return file_bytes(_state_bytes(plan, rank, others, shards, ALIGNMENT))


def file_bytes(num_bytes: int) -> int:
    """Return the bytes of a file of copies of so many bytes each."""
    return GENERATIONS * (MARKS + META_BYTES + num_bytes)


def aligned_bytes(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


def _state_bytes(
    plan: Plan, rank: int, names: Collection[str], shards: Mapping[str, int] | None, alignment: int = 1
) -> int:
    """Return the bytes of masters and moments of some domains on a rank of one pipeline rank.

    alignment: of each tensor.
    """
    config = plan.config
    owns_embedding = rank == plan.table.rank_of[0]
    stages = [stage for number, stage in held_by(plan, rank).items() if number < plan.table.depth]
    owned = [bucket for stage in stages for bucket in stage.buckets if bucket.owned]
    buckets = [bucket for bucket in owned if owns_embedding or not bucket.plan.tied]
    (_, wide), moment = itemsizes_of(config), moment_bytes(config)

    def part_bytes(mapped: BucketMap, shard: int) -> int:
        total = 0
        for spec, begin, end in mapped.runs(shard):
            moments = num_moments(config.optimizer, spec.group) if spec.updated else 0
            total += aligned_bytes((end - begin) * wide, alignment)
            total += moments * aligned_bytes((end - begin) * moment, alignment)
        return total

    total = 0
    for name, domain in domains_of(config).items():
        if name in names:
            mine = [bucket.weights.map for bucket in buckets if bucket.plan.domain == name]
            parts = range(domain.num_shards(config)) if shards is None else (shards[name],)
            total += max(sum(part_bytes(mapped, shard) for mapped in mine) for shard in parts)
    return total
