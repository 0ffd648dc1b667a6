"""Seconds of collectives over a machine's links: latency of hops, bytes over the slowest link.

A group of n ranks has g of them on each node. In a ring each node is entered and left once: its
cards carry g shares for the group, while the other ranks_per_node / g groups of the same axis use
the rest. Latencies are NCCL's, a hop inside a node or between two (NVIDIA/nccl
src/graph/tuning.cc).
"""

from collections.abc import Mapping
from typing import NamedTuple

from mpitrain.plan.declared.work import MessageVolume
from mpitrain.plan.predict.step_time.machine import MachineRates


class RankGroup(NamedTuple):
    """Ranks of an axis. size: how many. near: of these on one node. paired: two with a link of their own."""

    size: int
    near: int
    paired: bool = False

    @property
    def nodes(self) -> int:
        return -(-self.size // self.near)


def group_of(size: int, stride: int, machine: MachineRates) -> RankGroup:
    """Return a group whose neighbours are `stride` ranks apart, ranks filling nodes in order."""
    near = max(1, min(size, machine.ranks_per_node // stride))
    return RankGroup(size, near, bool(machine.pair) and stride == 1 and near == size == 2)


def _inside(machine: MachineRates, group: RankGroup) -> float:
    """Return bytes/s of one rank to others of the group on its node."""
    return machine.pair if group.paired else machine.inside


def _latency(machine: MachineRates, group: RankGroup) -> float:
    """Return the seconds of the slowest hop."""
    if group.nodes > 1:
        return machine.between_latency_s
    return machine.pair_latency_s if group.paired else machine.inside_latency_s


def _between(machine: MachineRates, group: RankGroup) -> float:
    """Return bytes/s of one rank to other nodes, on a fabric that many nodes share."""
    share = machine.contention if group.nodes >= machine.contended_nodes else 1.0
    return machine.between * share


def ring_bandwidth(group: RankGroup, machine: MachineRates) -> float:
    """Return the bytes/s at which a ring goes round."""
    if group.nodes == 1:
        return _inside(machine, group)
    return min(machine.inside, _between(machine, group) * group.near)


def hops_seconds(group: RankGroup, machine: MachineRates) -> float:
    """Return the latency of once around, in a ring up to 32 ranks, down a tree of nodes above."""
    inside = min(group.near, group.size) - 1
    across = group.nodes - 1
    across = across if across <= 32 else 32 + (across - 32).bit_length() * 4
    near_latency_s = machine.pair_latency_s if group.paired else machine.inside_latency_s
    return inside * near_latency_s + across * machine.between_latency_s


def seconds(
    operation: str,
    num_bytes: float,
    group: RankGroup,
    machine: MachineRates,
    copies: int = 1,
    open_share: tuple[int, int] = (1, 1),
) -> float:
    """Return the seconds of one operation. num_bytes: as comm/base/wire.py counts a buffer.

    copies: of a row in it, for its experts. open_share: groups of experts that a token may be sent
    to, and all of them.
    """
    n = group.size
    if n == 1 or not num_bytes:
        return 0.0
    if operation in ("all_gather", "reduce_scatter"):
        return hops_seconds(group, machine) + num_bytes * (n - 1) / n / ring_bandwidth(group, machine)
    if operation == "all_reduce":
        return 2 * seconds("all_gather", num_bytes, group, machine)
    if operation == "all_to_all":
        far = (n - group.near) / n * num_bytes / _between(machine, group)
        near = (group.near - 1) / n * num_bytes / _inside(machine, group)
        return max(far, near) + 2 * _latency(machine, group)
    if operation == "all_to_all_by_node":
        return _by_node_seconds(num_bytes, group, machine, copies, open_share)
    # a shift: the slowest neighbours
    return num_bytes / ring_bandwidth(group, machine) + _latency(machine, group)


def _by_node_seconds(
    num_bytes: float, group: RankGroup, machine: MachineRates, copies: int, open_share: tuple[int, int]
) -> float:
    """Return the seconds in which each row crosses once to each node (arXiv:2412.19437, 3.2.2).

    num_bytes: of a row's copies for all its experts; spread at random, they meet
    n (1 - (1 - 1 / n)^copies) of the n nodes that have the groups open to a token: of several
    groups on a node, each is taken to be on another.
    """
    nodes = group.nodes
    active, groups = open_share
    reached = nodes if active == groups else min(nodes, max(active, nodes * active / groups))
    met = reached * (1 - (1 - 1 / reached) ** copies)
    far = num_bytes / copies * met * (nodes - 1) / nodes / _between(machine, group)
    near = num_bytes * (group.near - 1) / group.near / machine.inside
    return max(far, near) + 2 * _latency(machine, group)


def sent_seconds(sent: MessageVolume, groups: Mapping[str, RankGroup], machine: MachineRates) -> float:
    """Return the seconds of what a part sends."""
    open_share = sent.groups_active, sent.groups
    return seconds(sent.operation, sent.num_bytes, groups[sent.axis], machine, sent.copies, open_share)
