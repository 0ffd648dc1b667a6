"""What a rank may hold, and whether a plan keeps to it, before anything is allocated."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.process_memory import FIRST_USES, HOLES, LIBRARY, of_processes
from mpitrain.plan.predict.snapshot_bytes import copy_bytes
from mpitrain.plan.predict.step_time.machine import find_machine

# what a driver for GPUs makes: NVIDIA's, its Jetson's, AMD's, and that of Linux in Windows
DRIVERS_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
USABLE = 0.9  # of a memory that was found: predictions are a little low


class MemoryLimit(NamedTuple):
    """What a rank may hold.

    num_bytes: of a rank. on_gpu: of its GPU alone; else all of the process. shared: of a node,
    whose ranks may hold more and less. exact: somebody chose this number, nothing is left free.
    source: whose it is, in words.
    """

    num_bytes: int
    on_gpu: bool
    shared: bool
    exact: bool
    source: str

    @property
    def usable(self) -> float:
        """Bytes that a layout may hold which is chosen to fit."""
        return self.num_bytes if self.exact else USABLE * self.num_bytes

    @property
    def of_tensors(self) -> float:
        """What `usable` leaves for tensors: a process takes the rest before it has a model."""
        return self.usable if self.on_gpu else self.usable - LIBRARY - FIRST_USES - HOLES


def chosen_limit(limit_gb: float, on_gpu: bool) -> MemoryLimit:
    """Return the limit of memory.limit_gb."""
    return MemoryLimit(round(limit_gb * 1e9), on_gpu, False, True, f"memory.limit_gb = {limit_gb:g}")


def limit_of_node(ranks: int) -> MemoryLimit:
    """Return the share that each of so many ranks has of this node's memory."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    source = f"this node's {found / 1e9:.3g} GB for {ranks} rank{'s' * (ranks > 1)}"
    return MemoryLimit(found // ranks, False, True, False, source)


def may_have_gpus() -> bool:
    """Return whether a driver for GPUs is there, which says whether torch is worth asking."""
    return any(os.path.exists(path) for path in DRIVERS_FILES)


def computes_on_gpu(config: Config) -> bool:
    """Return whether ranks would compute on GPUs, as far as is known without torch."""
    if config.run.machine:
        return find_machine(config.run.machine).device == "cuda"
    return config.run.device == "cuda" or (config.run.device == "auto" and may_have_gpus())


def held_by_ranks(plan: Plan, on_gpu: bool) -> list[int]:
    """Return the bytes that a rank of each pipeline rank holds: on its GPU, or as a process on a CPU."""
    usages = predict(plan, on_gpu=on_gpu)
    if on_gpu:
        return [usage.on_device for usage in usages]
    processes = of_processes(plan, usages)
    return [
        sum(usage) + copy_bytes(plan, rank) + sum(process)
        for rank, (usage, process) in enumerate(zip(usages, processes))
    ]


def counted(held: Sequence[int], limit: MemoryLimit) -> int:
    """Return what counts against a limit: the fullest rank, or the mean where a node's ranks share."""
    return sum(held) // len(held) if limit.shared else max(held)


def require_limit(plan: Plan) -> None:
    """Raise ConfigError if the fullest rank holds more than memory.limit_gb."""
    config = plan.config
    if not config.memory.limit_gb:
        return
    on_gpu = computes_on_gpu(config)
    held = max(held_by_ranks(plan, on_gpu))
    if held > config.memory.limit_gb * 1e9:
        raise ConfigError(
            f"memory.limit_gb = {config.memory.limit_gb:g}: the fullest rank of this layout holds "
            f"{held / 1e9:.3g} GB{'' if on_gpu else ' as a process'}; start more ranks, use a smaller "
            'model or memory.recompute = "full", or leave the layout open (parallel.*, pipeline.*)'
        )
