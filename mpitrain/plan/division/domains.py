"""Over which axes the state of a bucket is divided: its domain. Names and integers only.

Parameters that all data ranks share are divided over other ranks than those that only some have.
Everything that ZeRO divides (weights, gradients, the optimiser's state, what a rank saves and
counts) asks the bucket's domain.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from mpitrain.plan.declared.parameters import EXPERT, Spec, itemsizes_of
from mpitrain.plan.declared.resolved import ResolvedConfig, ResolvedParallel


class Domain(NamedTuple):
    """The axes of a domain, by name.

    shard: divides the state.
    replicate: has the same shard.
    matrix: has the parts of one matrix: tp times `shard`.
    num_shards: the size of `shard` in a layout.
    """

    shard: str
    replicate: str
    matrix: str
    num_shards: Callable[[ResolvedConfig], int]


def _data_ranks_that_divide(config: ResolvedConfig) -> int:
    parallel = config.parallel
    return parallel.cp * (parallel.dp_shard or parallel.dp) if parallel.zero else 1


def _ranks_that_divide_experts(config: ResolvedConfig) -> int:
    """All that have the same; with dp_shard, those that divide the dense state, if they are whole groups."""
    parallel = config.parallel
    inside = parallel.ep * parallel.etp
    near = parallel.tp * parallel.cp * (parallel.dp_shard or parallel.dp)
    return (near // inside if near % inside == 0 else 1) if parallel.zero else 1


# counted: what isn't trained (optim/expert_bias.py), never rounded; divided as the dense state is
DENSE = "dense"
COUNTED = "counted"
DOMAINS = {
    DENSE: Domain("shard", "replicate", "matrix", _data_ranks_that_divide),
    COUNTED: Domain("shard", "replicate", "matrix", _data_ranks_that_divide),
    EXPERT: Domain("expert_shard", "expert_replicate", "expert_matrix", _ranks_that_divide_experts),
}


def lends_gradients(parallel: ResolvedParallel) -> bool:
    """Return whether a rank keeps shards of gradients only, and whole ones are in memory that is lent."""
    return parallel.zero >= 2 or parallel.reduce == "microbatch"


def drops_weights(config: ResolvedConfig, domain: str) -> bool:
    """Return whether a rank keeps only its shard of a domain's weights, and whole ones are in lent memory.

    Weights that are kept over a step aren't: their memory is taken all the time, so the shard lies
    in it.
    """
    parallel = config.parallel
    return parallel.zero == 3 and gather_of(parallel) == "use" and DOMAINS[domain].num_shards(config) > 1


def gather_of(parallel: ResolvedParallel) -> Literal["use", "step"]:
    """Return when weights are dropped; what is open, predict/link_choices.py settles by measured links."""
    return "use" if parallel.gather == "auto" else parallel.gather


def divided(config: ResolvedConfig) -> bool:
    """Return whether parallel.zero divides anything: there is more than one rank to divide it over."""
    return any(domain.num_shards(config) > 1 for domain in domains_of(config).values())


def divided_experts(config: ResolvedConfig) -> bool:
    """Return whether several ranks divide the state of the same experts."""
    return DOMAINS[EXPERT].num_shards(config) > 1


def domains_of(config: ResolvedConfig) -> dict[str, Domain]:
    """Return the domains that a model has parameters of."""
    absent = [COUNTED] * (not counts_apart(config)) + [EXPERT] * (not config.experts.count)
    return {name: domain for name, domain in DOMAINS.items() if name not in absent}


def counts_apart(config: ResolvedConfig) -> bool:
    """Return whether what is counted has buckets of its own: where other weights, or other
    gradients on their way, are rounded.
    """
    narrow, wide = itemsizes_of(config)
    return bool(config.experts.count) and (narrow < wide or config.precision.reduce != "same")


def domain_of(config: ResolvedConfig, spec: Spec) -> str:
    """Return the domain of the bucket that a parameter is in."""
    return spec.domain if spec.trained or not counts_apart(config) else COUNTED


def itemsize_of_weights(config: ResolvedConfig, domain: str) -> int:
    """Return the bytes of a number of the weights of a domain, as a layer computes with them."""
    narrow, wide = itemsizes_of(config)
    return wide if domain == COUNTED else narrow


def itemsize_on_the_wire(config: ResolvedConfig, domain: str) -> int:
    """Return the bytes of a number of the gradients of a domain, as data ranks exchange them."""
    rounded = config.precision.reduce == "bf16" and domain != COUNTED
    return 2 if rounded else itemsizes_of(config)[1]


def reduces_each(config: ResolvedConfig) -> bool:
    """Return whether gradients are reduced after each microbatch, which parallel.reduce = "auto" leaves open.

    A tree sums over microbatches first.
    """
    if config.parallel.reduce != "auto":
        return config.parallel.reduce == "microbatch"
    return divided(config) and config.parallel.zero >= 2 and config.numerics.reproducible == "run"
