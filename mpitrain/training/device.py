"""The device of a rank and its share of the cores."""

import torch

from mpitrain.cluster.threads import num_threads
from mpitrain.config import Config, Run
from mpitrain.errors import ConfigError
from mpitrain.training.determinism import settle

FP8 = (8, 9)  # compute capability of the first GPUs that multiply it


def choose_device(config: Config, node_rank: int) -> torch.device:
    """Return this rank's device and set torch's threads. The ranks of a node take its GPUs in turn. Raises ConfigError."""
    set_threads(config.run)
    available = torch.cuda.is_available()
    if config.run.device == "cuda" and not available:
        raise ConfigError('run.device = "cuda": torch finds no CUDA device; use "cpu" or "auto"')
    if config.run.device == "cpu" or not available:
        return torch.device("cpu")
    settle(config.numerics)
    device = torch.device("cuda", node_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if config.precision.compute == "fp8" and (capability := torch.cuda.get_device_capability(device)) < FP8:
        found, needed = (".".join(map(str, numbers)) for numbers in (capability, FP8))
        raise ConfigError(
            f'precision.compute = "fp8": found a GPU of compute capability {found}; needed {needed} or newer; use "bf16"'
        )
    return device


def set_threads(run: Run) -> None:
    """Set torch's threads, which bits depend on. Raises ConfigError."""
    torch.set_num_threads(num_threads(run))
