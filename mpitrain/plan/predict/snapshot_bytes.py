"""What a rank copies to host memory to save it beside the steps (run.save = "background"): each
element of the model by one rank.
"""

from collections.abc import Mapping

from mpitrain.plan.declared.optimizers import num_moments
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.division.domains import domains_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import held_by
from mpitrain.plan.predict.memory import moment_bytes


def copy_bytes(plan: Plan, rank: int, shards: Mapping[str, int] | None = None) -> int:
    """Return the bytes of the copy of a rank of one pipeline rank, of those that save: the first
    with their shard, and along tp.

    shards: its part of a state that is divided, by domain; None: the one that is largest.
    """
    if plan.config.run.save == "blocking":
        return 0
    owns_embedding = rank == plan.table.rank_of[0]
    stages = {number: stage for number, stage in held_by(plan, rank).items() if number < plan.table.depth}
    buckets = [
        b
        for stage in stages.values()
        for b in stage.buckets
        if b.owned and (owns_embedding or not b.plan.tied)
    ]
    total, (_, wide), moment = 0, itemsizes_of(plan.config), moment_bytes(plan.config)
    for name, domain in domains_of(plan.config).items():
        mine = [bucket.weights.layout for bucket in buckets if bucket.plan.domain == name]
        shard_numbers = range(domain.num_shards(plan.config)) if shards is None else (shards[name],)
        runs = (
            [(spec, end - begin) for layout in mine for spec, begin, end in layout.runs(shard)]
            for shard in shard_numbers
        )
        total += max(
            sum(
                n * (wide + spec.updated * num_moments(plan.config.optimizer, spec.group) * moment)
                for spec, n in part
            )
            for part in runs
        )
    return total
