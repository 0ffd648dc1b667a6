"""What a rank may hold by memory.limit_gb, run.machine, a GPU or this node, and whether a plan has more."""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError, counted
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.cheapest_change import cheapest_change
from mpitrain.plan.predict.gpu_share import GpuShare, may_have_gpus
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.process_memory import BEFORE_A_MODEL, processes_memory
from mpitrain.plan.predict.snapshot_bytes import copy_bytes, memory_copy_bytes
from mpitrain.plan.predict.step_time.machine import find_machine, rates_of

USABLE = 0.9  # of a memory that was found: predictions are a little low


class MemoryLimit(NamedTuple):
    """What a rank may hold.

    total_bytes: that `ranks` have together: those of a node, which may hold more and less; 1: it
    has them alone. on_gpu: of its GPU alone; else all of the process. exact: somebody chose this
    number, nothing is left free. source: whose it is, in words.
    """

    total_bytes: int
    on_gpu: bool
    exact: bool
    source: str
    ranks: int = 1
    of_node: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank."""
        return self.total_bytes // self.ranks

    @property
    def share(self) -> float:
        """What part of its bytes a layout may hold which is chosen to fit."""
        return 1 if self.exact else USABLE

    @property
    def usable(self) -> float:
        """Bytes that a layout may hold which is chosen to fit."""
        return self.share * self.num_bytes

    @property
    def of_tensors(self) -> float:
        """What `usable` leaves for tensors: a process takes the rest before it has a model."""
        return self.usable if self.on_gpu else self.usable - BEFORE_A_MODEL

    def needed(self, held: Sequence[int]) -> int:
        """Return what counts against total_bytes of what each pipeline rank holds.

        The rank with most; where a node's ranks share its memory, all of them.
        """
        return self.ranks * sum(held) // len(held) if self.of_node else max(held)


def limit_of_rank(
    config: Config, num_ranks: int, node_ranks: int = 0, gpu: GpuShare | None = None
) -> MemoryLimit | None:
    """Return what a rank may hold; None for a GPU that nobody has named or looked at.

    node_ranks: that share a node; 0: those of the machine, or all. gpu: that was found.
    Raises ConfigError for a run.machine that isn't known.
    """
    if config.memory.limit_gb:
        on_gpu = gpu is not None or computes_on_gpu(config)
        source = f"memory.limit_gb = {config.memory.limit_gb:g}"
        return MemoryLimit(round(config.memory.limit_gb * 1e9), on_gpu, True, source)
    if config.run.machine:
        rates = rates_of(config, node_ranks)
        source = f"the {rates.memory_bytes / 1e9:.3g} GB of a rank on {rates.name} (run.machine)"
        return MemoryLimit(rates.memory_bytes, rates.on_gpu, False, source)
    if gpu is not None:
        return MemoryLimit(gpu.num_bytes, True, False, f"its {gpu.num_bytes / 1e9:.3g} GB of {gpu.name}")
    if computes_on_gpu(config):
        return None
    return limit_of_node(min(config.comm.node_ranks or node_ranks or num_ranks, num_ranks))


def limit_of_node(ranks: int) -> MemoryLimit:
    """Return the memory that so many ranks share on this node."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    source = f"this node's {total / 1e9:.3g} GB for {counted(ranks, 'ranks')}"
    return MemoryLimit(total, False, False, source, ranks, of_node=True)


def computes_on_gpu(config: Config) -> bool:
    """Return whether ranks would compute on GPUs, as far as is known without torch."""
    if config.run.machine:
        return find_machine(config.run.machine).device == "cuda"
    return config.run.device == "cuda" or (config.run.device == "auto" and may_have_gpus())


def held_by_ranks(plan: Plan, on_gpu: bool) -> list[int]:
    """Return the bytes that each pipeline rank holds: on its GPU, or as a process on a CPU."""
    usages = predict(plan, on_gpu=on_gpu)
    if on_gpu:
        return [usage.on_device for usage in usages]
    processes = processes_memory(plan, usages)
    return [
        sum(usage) + copy_bytes(plan, rank) + memory_copy_bytes(plan, rank) + sum(process)
        for rank, (usage, process) in enumerate(zip(usages, processes))
    ]


def require_limit(plan: Plan, given: Config, planned: Callable[[Config], Plan], node_ranks: int = 0) -> int:
    """Return the bytes of the rank with most memory; 0 without memory.limit_gb and run.machine.

    Raises ConfigError if they are more than these have.
    given: what was planned, before it was resolved. planned: makes the plan of another one.
    """
    if not (given.memory.limit_gb or given.run.machine):
        return 0
    limit = limit_of_rank(given, plan.axes.grid.size, node_ranks)
    assert limit is not None
    held = limit.needed(held_by_ranks(plan, limit.on_gpu))
    if held > limit.total_bytes:
        raise ConfigError(
            f"{limit.source}: the rank with most memory holds {held / 1e9:.3g} GB in this layout"
            f"{'' if limit.on_gpu else ', as a process'}; {change_that_fits(plan, given, planned, limit)}"
        )
    return held


def change_that_fits(plan: Plan, given: Config, planned: Callable[[Config], Plan], limit: MemoryLimit) -> str:
    """Say the cheapest change with which a plan fits, or that none does."""

    def fits(other: Plan) -> bool:
        return limit.needed(held_by_ranks(other, limit.on_gpu)) <= limit.total_bytes

    change = cheapest_change(plan, given, planned, fits)
    if change:
        return f"the cheapest change that fits: {change}"
    return (
        "neither a stage of ZeRO nor recomputation fits, nor both together: take more ranks, divide the "
        "model further (parallel.pp, parallel.tp), or leave the layout open (parallel.*, pipeline.*)"
    )
