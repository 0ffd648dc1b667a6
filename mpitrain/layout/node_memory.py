"""Whether a node's memory holds what its ranks keep at least, asked before anything is allocated."""

import os

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.layout.domains import DENSE, DOMAINS
from mpitrain.layout.memory import num_moments
from mpitrain.layout.parameters import itemsizes_of
from mpitrain.layout.plan import Plan


def require_memory(plan: Plan) -> None:
    """Raise ConfigError if one rank's share of the largest stage can't fit into this node's memory: weights, gradients and moments.

    The tensor-parallel ranks of a stage are on one node, and have it all together.
    """
    config, stages = plan.config, plan.stages
    by_name = [{spec.name: spec.numel for block in stage.specs() for spec in block} for stage in stages]  # tied ones once
    largest = max(sum(found.values()) for found in by_name)
    found, needed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), round(_bytes_of_state(config) * largest)
    if needed <= found or (config.run.device != "cpu" and _finds_a_gpu()):
        return
    raise ConfigError(
        f"the largest of {len(stages)} stages needs {needed / 2**30:,.0f} GiB for weights, gradients and moments, this node has "
        f"{found / 2**30:,.0f} GiB; choose a smaller model or more stages (parallel.pp)"
    )


def _finds_a_gpu() -> bool:
    import torch  # here, because what else is wrong is refused before torch is loaded

    return torch.cuda.is_available()


def _bytes_of_state(config: Config) -> float:
    """Return the bytes that a rank keeps at least for each parameter of its stage, masters of 16-bit weights not counted."""
    parallel, optimizer, (narrow, wide) = config.parallel, config.optimizer, itemsizes_of(config)
    moments = num_moments(optimizer, "matrix") * (2 if optimizer.moments == "bf16" else wide)
    parts, ranks = ((3, narrow), (2, wide), (1, moments)), DOMAINS[DENSE].num_shards(config)
    return sum(num_bytes / (ranks if parallel.zero >= least else 1) for least, num_bytes in parts)
