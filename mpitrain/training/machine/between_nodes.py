"""Settle by measured links between nodes when weights are fetched and what reductions go under."""

import os
from collections.abc import Sequence

from mpitrain.cluster.preflight import slowest_links
from mpitrain.comm.base.world import World
from mpitrain.errors import ConfigError
from mpitrain.kernels.precision import TYPES
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.link_choices import Machine, axes_between, choose, left_open
from mpitrain.plan.predict.memory import predict_rank
from mpitrain.plan.predict.node_memory import require_gpu_memory
from mpitrain.plan.predict.snapshot_bytes import copy_bytes, memory_copy_bytes
from mpitrain.training.machine.device_placement import DevicePlacement
from mpitrain.training.machine.peak_flops import peak_of_all

MOST = 0.8  # of a node's memory: Python, libraries and MPI have some, too


def settled(plan: Plan, world: World, placement: DevicePlacement) -> tuple[Plan, str]:
    """Return the plan with nothing left open, and why: "" within one node. Collective."""
    names = axes_between(plan)
    if not (left_open(plan) and _cross(names, plan, world)):
        return plan, ""
    peak = peak_of_all(placement, TYPES[plan.config.precision.compute], world).flops / world.size
    links = slowest_links(world, plan, names)
    machine = Machine(links, world.from_first_rank("how fast ranks compute", lambda: peak))
    return choose(plan, machine, lambda candidate: _fits(candidate, world, placement))


def _cross(names: Sequence[str], plan: Plan, world: World) -> bool:
    """Whether any rank has a neighbour on another node along one of these axes. Collective."""
    node_ranks = plan.config.comm.node_ranks
    mine = plan.axes.of(world.rank)
    if world.num_nodes == 1 and not node_ranks:
        return False
    first = min(world.node_gather("who is on this node", world.rank))
    if node_ranks:
        nodes = [rank // node_ranks for rank in range(world.size)]
    else:
        nodes = world.all_gather("their nodes", first)
    crosses = any(len({nodes[rank] for rank in mine[name]}) > 1 for name in names)
    return any(world.all_gather("whether data crosses nodes", crosses))


def _fits(plan: Plan, world: World, placement: DevicePlacement) -> bool:
    """Whether what the ranks of each node, or GPU, hold fits into its memory. Collective."""
    coordinate = plan.axes.grid.coordinates
    if (gpu := placement.gpu) is not None:
        fits = True
        try:
            stages = [coordinate(rank)["pp"] for rank in placement.sharers]
            require_gpu_memory(plan, stages, gpu.name, gpu.memory_bytes)
        except ConfigError:
            fits = False
        return all(world.all_gather("whether whole weights fit", fits))
    rank = coordinate(world.rank)["pp"]
    copied = copy_bytes(plan, rank) + memory_copy_bytes(plan, rank)
    needed = sum(world.node_gather("how much they hold", sum(predict_rank(plan, rank)) + copied))
    node_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return all(world.all_gather("whether whole weights fit", needed <= MOST * node_bytes))
