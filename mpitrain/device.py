"""The device of a rank and its share of the cores."""

import os

import torch

from mpitrain.config import Config, Run
from mpitrain.errors import ConfigError
from mpitrain.slicing import num_stages, specs_of


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
    return device


def require_memory(config: Config) -> None:
    """Raise ConfigError if the weights of one stage can't fit into this node's memory, with gradients and two moments."""
    if config.run.device != "cpu" and torch.cuda.is_available():
        return
    itemsize = 8 if config.precision.compute == "fp64" else 4
    stages = range(num_stages(config))
    largest = max(sum(spec.numel for block in specs_of(config, stage) for spec in block) for stage in stages)
    found, needed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 4 * itemsize * largest
    if needed > found:
        raise ConfigError(
            f"the largest of {len(stages)} stages needs {needed / 2**30:,.0f} GiB for weights, gradients and moments, this node has "
            f"{found / 2**30:,.0f} GiB; choose a smaller model or more stages (parallel.pp)"
        )


def set_threads(run: Run) -> None:
    """Set torch's threads: run.threads, else OMP_NUM_THREADS, else 1. Ranks are the unit of parallelism, and bits depend on threads."""
    torch.set_num_threads(run.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
