"""Whether the memory of a node, or of a GPU, holds what its ranks keep at least."""

import os
from collections.abc import Sequence

from mpitrain.errors import ConfigError, counted
from mpitrain.plan.declared.optimizers import num_moments
from mpitrain.plan.declared.parameters import EXPERT, itemsizes_of
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.domains import domain_of, domains_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import moment_bytes, predict_rank, weights_of_rank


def require_memory(plan: Plan, training: bool = True) -> None:
    """Raise ConfigError if a rank's share can't fit into this node.

    The share is that of the largest stage: weights, gradients and moments; without training,
    weights. The tensor-parallel ranks of a stage are on one node, and have it all together; those
    of its experts can be on others.
    """
    config = plan.config
    stages = plan.stages
    bytes_by_domain = {
        name: _bytes_of_state(config, name, training) / (config.parallel.ep if name == EXPERT else 1)
        for name in domains_of(config)
    }
    # tied ones once
    specs = [{spec.name: spec for block in stage.specs() for spec in block} for stage in stages]
    of_each = [
        sum(spec.numel * bytes_by_domain[domain_of(config, spec)] for spec in by_name.values())
        for by_name in specs
    ]
    gathered = 0  # by rank 0
    if training and config.run.shards == "one":
        gathered = _bytes_saved(config) * sum(spec.numel for spec in plan.parameters())
    node_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = round(max(of_each) + gathered)
    if needed <= node_bytes or (config.run.device != "cpu" and _finds_a_gpu()):
        return
    state, without = _state_phrases(config) if training else ("weights", "")
    raise ConfigError(
        f"the largest of {counted(len(stages), 'stages')} needs {needed / 2**30:,.0f} GiB for {state}, this "
        f"node has {node_bytes / 2**30:,.0f} GiB; choose a smaller model or more stages "
        f"(parallel.pp){without}"
    )


def require_gpu_memory(
    plan: Plan, pipeline_ranks: Sequence[int], name: str, found_bytes: int, training: bool = True
) -> None:
    """Raise ConfigError if what the ranks on one GPU keep at least can't fit into its memory.

    It is what `mpitrain memory` says of each. Activations of experts aren't counted, for these it
    says the most; nor is what kernels work with, which is measured on CPUs, nor what messages take
    on the host.

    pipeline_ranks: the coordinate along pp of each rank on it.
    training: without, a rank keeps weights alone.
    """
    if not training:
        _require_weights(plan, pipeline_ranks, name, found_bytes)
        return
    usages = {rank: predict_rank(plan, rank, on_gpu=True) for rank in set(pipeline_ranks)}
    of_experts = bool(plan.config.experts.count)
    uncounted = {
        rank: usage.working + usage.messages + of_experts * (usage.activations + usage.recomputed)
        for rank, usage in usages.items()
    }
    needed = sum(usages[rank].on_device - uncounted[rank] for rank in pipeline_ranks)
    if needed <= found_bytes:
        return
    tail = "pipeline.tail, " * (plan.config.pipeline.tail > 1)
    who, fewer = "a rank keeps", ""
    if (many := len(pipeline_ranks)) > 1:
        who, fewer = f"{many} ranks share a GPU, and keep", "start fewer ranks on each GPU, "
    raise ConfigError(
        f"{who} at least {needed / 2**30:,.1f} GiB of weights, gradients, moments and activations on it; "
        f"{name} has {found_bytes / 2**30:,.1f} GiB; {fewer}choose a smaller model or more stages "
        f"(parallel.pp), or look at {tail}parallel.zero and memory.offload (mpitrain memory shows what each "
        "rank holds)"
    )


def _require_weights(plan: Plan, pipeline_ranks: Sequence[int], name: str, found_bytes: int) -> None:
    needed = sum(weights_of_rank(plan, rank) for rank in pipeline_ranks)
    if needed > found_bytes:
        raise ConfigError(
            f"{len(pipeline_ranks)} ranks keep {needed / 2**30:,.1f} GiB of weights on {name}, which has "
            f"{found_bytes / 2**30:,.1f} GiB; start more ranks on more GPUs, or set parallel.zero = 3"
        )


def _finds_a_gpu() -> bool:
    import torch  # here, because what else is wrong is refused before torch is loaded

    return torch.cuda.is_available()


def _bytes_of_state(config: ResolvedConfig, domain: str, training: bool) -> float:
    """Return what a rank keeps at least of each parameter of a domain, without masters of 16-bit weights."""
    parallel, (narrow, wide), saved = config.parallel, itemsizes_of(config), _bytes_saved(config)
    copied = saved if config.run.save == "background" and config.run.shards != "one" else 0
    parts = ((3, narrow), (2, wide), (1, saved - wide + copied))[: None if training else 1]
    ranks = domains_of(config)[domain].num_shards(config)
    return sum(num_bytes / (ranks if parallel.zero >= least else 1) for least, num_bytes in parts)


def _bytes_saved(config: ResolvedConfig) -> int:
    """Return the bytes of a parameter in a checkpoint: itself and its moments."""
    return itemsizes_of(config)[1] + num_moments(config.optimizer, "matrix") * moment_bytes(config)


def _state_phrases(config: ResolvedConfig) -> tuple[str, str]:
    """Return what a message says of the state, with the snapshot, and what to do without it."""
    state = "weights, gradients and moments"
    if config.run.shards == "one":
        return f"{state}, and a copy of the whole model to save from", ', or run.shards = "rank"'
    if config.run.save == "background":
        return f"{state}, and a copy of them to save from", ', or run.save = "blocking"'
    return state, ""
