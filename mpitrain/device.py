"""The device of a rank and its share of the cores."""

import os

import torch

from mpitrain.config import Config, Run
from mpitrain.errors import ConfigError
from mpitrain.slicing import itemsizes_of, num_stages, specs_of

FP8 = (8, 9)  # compute capability of the first GPUs that multiply it


def choose_device(config: Config, node_rank: int) -> torch.device:
    """Return this rank's device and set torch's threads. The ranks of a node take its GPUs in turn. Raises ConfigError."""
    set_threads(config.run)
    available = torch.cuda.is_available()
    if config.run.device == "cuda" and not available:
        raise ConfigError('run.device = "cuda": torch finds no CUDA device; use "cpu" or "auto"')
    if config.run.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", node_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if config.precision.compute == "fp8" and (capability := torch.cuda.get_device_capability(device)) < FP8:
        found, needed = (".".join(map(str, numbers)) for numbers in (capability, FP8))
        raise ConfigError(
            f'precision.compute = "fp8": found a GPU of compute capability {found}; needed {needed} or newer; use "bf16"'
        )
    return device


def require_memory(config: Config) -> None:
    """Raise ConfigError if one rank's share of the largest stage can't fit into this node's memory: weights, gradients and moments.

    The tensor-parallel ranks of a stage are on one node, and have it all together.
    """
    if config.run.device != "cpu" and torch.cuda.is_available():
        return
    stages = range(num_stages(config))
    by_name = [{spec.name: spec.numel for block in specs_of(config, stage) for spec in block} for stage in stages]  # tied ones once
    largest = max(sum(found.values()) for found in by_name)
    found, needed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), round(_bytes_of_state(config) * largest)
    if needed > found:
        raise ConfigError(
            f"the largest of {len(stages)} stages needs {needed / 2**30:,.0f} GiB for weights, gradients and moments, this node has "
            f"{found / 2**30:,.0f} GiB; choose a smaller model or more stages (parallel.pp)"
        )


def _bytes_of_state(config: Config) -> float:
    """Return the bytes that a rank keeps at least for each parameter of its stage, masters of 16-bit weights not counted."""
    parallel, optimizer, (narrow, wide) = config.parallel, config.optimizer, itemsizes_of(config)
    num_moments = {"adamw": 2, "muon": 1}.get(optimizer.name, 1 if optimizer.momentum else 0)
    parts = (3, narrow), (2, wide), (1, num_moments * (2 if optimizer.moments == "bf16" else wide))
    ranks = parallel.cp * (parallel.dp_shard or parallel.dp)
    return sum(num_bytes / (ranks if parallel.zero >= least else 1) for least, num_bytes in parts)


def set_threads(run: Run) -> None:
    """Set torch's threads: run.threads, else OMP_NUM_THREADS, else 1. Ranks are the unit of parallelism, and bits depend on threads."""
    torch.set_num_threads(run.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
