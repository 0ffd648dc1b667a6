"""What settings that are there for speed cost in memory."""

from mpitrain.config import Config
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.domains import domains_of, drops_weights, gather_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import buckets_of
from mpitrain.plan.predict.memory import lent_bytes
from mpitrain.plan.predict.promises import COPIES, more_than, most_bytes, with_parallel


def zero_line(given: Config, resolved: ResolvedConfig) -> str:
    """Say so if ZeRO was asked for, and there is one data rank, over which nothing is divided."""
    if not given.parallel.zero or resolved.parallel.zero:
        return ""
    ranks = f"parallel.dp = {resolved.parallel.dp} and parallel.cp = {resolved.parallel.cp}"
    return (
        f"parallel.zero = {given.parallel.zero} divides nothing with {ranks}; the run uses parallel.zero = 0"
    )


def costs(plan: Plan) -> list[str]:
    """Say what settings cost that hold more for speed or bits than the stage of ZeRO needs."""
    parallel = plan.config.parallel
    lines = []
    if parallel.reduce == "microbatch":
        lines += _costs_of_each(plan)
    elif parallel.zero >= 2 and plan.num_microbatches > 1:
        lent = max(lent_bytes(plan, rank)[1] for rank in range(parallel.pp))
        instead = (
            'numerics.reproducible = "layout" needs it'
            if plan.config.numerics.reproducible == "layout"
            else f'"microbatch" keeps none, and sends gradients {plan.num_microbatches} times a step'
        )
        lines.append(
            f'parallel.reduce = "step" keeps {lent / 1e6:,.2f} MB of whole gradients until the last '
            f"microbatch; {instead}"
        )
    if parallel.zero == 3 and gather_of(parallel) == "step":
        more = most_bytes(plan) - most_bytes(with_parallel(plan, gather="use"))
        held = f"holds {more / 1e6:,.2f} MB more" if more > 0 else "holds no more"
        lines.append(f'parallel.gather = "step" {held} than "use", which drops weights after each use')
    elif any(drops_weights(plan.config, domain) for domain in domains_of(plan.config)):
        more = most_bytes(plan) - most_bytes(with_parallel(plan, gather="step"))
        if more >= 0:
            lines.append(
                f'parallel.gather = "use" {more_than(more)} "step" here, although "step" sends less: two '
                "blocks are whole at the same time, such as embedding and head, and they are most "
                "of a rank's weights"
            )
    return lines


def _costs_of_each(plan: Plan) -> list[str]:
    """Say what a sum after each microbatch costs, where it holds no less than a sum once a step."""
    parallel = plan.config.parallel
    if plan.table.copies > 1:
        return [f'parallel.reduce = "microbatch" does nothing with {plan.config.pipeline.schedule}: {COPIES}']
    saved = max(_whole_gradients(plan, rank) - lent_bytes(plan, rank)[1] for rank in range(parallel.pp))
    if saved > 0 or (parallel.zero >= 2 and plan.num_microbatches == 1):
        return []
    why = "it has several whole buckets at the same time; a smaller comm.bucket_mb needs less"
    if not parallel.zero:
        why = "the sums of gradients are also whole"
    more = f"holds {-saved / 1e6:,.2f} MB more" if saved else "saves nothing"
    statement = f'parallel.reduce = "microbatch" with parallel.zero = {parallel.zero} {more} than "step" here'
    return [f"{statement}, and sends gradients {plan.num_microbatches} times a step: {why}"]


def _whole_gradients(plan: Plan, rank: int) -> int:
    """Return the bytes of gradients that only a sum once a step has whole.

    With ZeRO-1 a rank has its shard's in either way, and with ZeRO-0 all of them.
    """
    _, wide = itemsizes_of(plan.config)
    gradients = [gradient for bucket in buckets_of(plan, rank) for gradient in bucket.gradients]
    shards = sum(held.kept(divided=True) for held in gradients) if plan.config.parallel.zero < 2 else 0
    return (sum(held.length for held in gradients) - shards) * wide
