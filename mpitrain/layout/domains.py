"""Over which axes the state of a bucket is divided: its domain. Names and integers only.

A stage can have buckets of several domains: parameters that all data ranks share are divided over other ranks than those that only some
have. Everything that ZeRO divides (weights, gradients, the optimiser's state, what a rank saves and counts) asks the bucket's domain.
"""

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.layout.parameters import EXPERT


class Domain(NamedTuple):
    """The axes of a domain, by name.

    shard: divides the state.  replicate: has the same shard.  matrix: has the parts of one matrix: tp times `shard`.
    num_shards: the size of `shard` in a layout.
    """

    shard: str
    replicate: str
    matrix: str
    num_shards: Callable[[Config], int]


def _data_ranks_that_divide(config: Config) -> int:
    parallel = config.parallel
    return parallel.cp * (parallel.dp_shard or parallel.dp) if parallel.zero else 1


def _ranks_that_divide_experts(config: Config) -> int:
    """All that have the same experts; with dp_shard, those among the ranks that divide the dense state, if they are whole groups."""
    parallel = config.parallel
    inside = parallel.ep * parallel.etp
    near = parallel.tp * parallel.cp * (parallel.dp_shard or parallel.dp)
    return (near // inside if near % inside == 0 else 1) if parallel.zero else 1


DENSE = "dense"
DOMAINS = {
    DENSE: Domain("shard", "replicate", "matrix", _data_ranks_that_divide),
    EXPERT: Domain("expert_shard", "expert_replicate", "expert_matrix", _ranks_that_divide_experts),
}


def domains_of(config: Config) -> dict[str, Domain]:
    """Return the domains that a model has parameters of."""
    return {name: domain for name, domain in DOMAINS.items() if name != EXPERT or config.experts.count}
