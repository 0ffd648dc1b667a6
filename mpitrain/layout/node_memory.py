"""Whether a node's memory holds what its ranks keep at least, asked before anything is allocated."""

import os

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.layout.domains import domains_of
from mpitrain.layout.memory import num_moments
from mpitrain.layout.parameters import EXPERT, itemsizes_of
from mpitrain.layout.plan import Plan


def require_memory(plan: Plan) -> None:
    """Raise ConfigError if one rank's share of the largest stage can't fit into this node's memory: weights, gradients and moments.

    The tensor-parallel ranks of a stage are on one node, and have it all together; those of its experts can be on others.
    """
    config, stages = plan.config, plan.stages
    each = {name: _bytes_of_state(config, name) / (config.parallel.ep if name == EXPERT else 1) for name in domains_of(config)}
    specs = [[spec for block in stage.specs() for spec in block] for stage in stages]
    by_name = [{spec.name: spec.numel * each[spec.domain] for spec in found} for found in specs]  # tied ones once
    found, needed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), round(max(sum(found.values()) for found in by_name))
    if needed <= found or (config.run.device != "cpu" and _finds_a_gpu()):
        return
    raise ConfigError(
        f"the largest of {len(stages)} stages needs {needed / 2**30:,.0f} GiB for weights, gradients and moments, this node has "
        f"{found / 2**30:,.0f} GiB; choose a smaller model or more stages (parallel.pp)"
    )


def _finds_a_gpu() -> bool:
    import torch  # here, because what else is wrong is refused before torch is loaded

    return torch.cuda.is_available()


def _bytes_of_state(config: Config, domain: str) -> float:
    """Return the bytes that a rank keeps at least for each parameter of a domain, masters of 16-bit weights not counted."""
    parallel, optimizer, (narrow, wide) = config.parallel, config.optimizer, itemsizes_of(config)
    moments = num_moments(optimizer, "matrix") * (2 if optimizer.moments == "bf16" else wide)
    parts, ranks = ((3, narrow), (2, wide), (1, moments)), domains_of(config)[domain].num_shards(config)
    return sum(num_bytes / (ranks if parallel.zero >= least else 1) for least, num_bytes in parts)
