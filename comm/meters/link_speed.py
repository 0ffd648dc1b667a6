"""How fast messages cross between nodes, measured now: around a ring of the nodes' first ranks.

    even nodes send while odd ones receive, then odd ones send: no rank has two of these messages
    at once

The time of a message and its answer, the middle of several: others may use the network meanwhile,
and shaped ones let a burst through.
"""

import time
from statistics import median

import numpy as np

from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.world import World

NUM_BYTES = 1 << 20
ROUNDS = 5


def between_nodes(world: World) -> list[tuple[int, int, float]]:
    """Return (rank, rank, bytes/s) of neighbouring nodes' first ranks, alike on all. Collective."""
    first = world.all_gather("measuring the links between nodes", world.node.rank == 0)
    ranks = [rank for rank, is_first in enumerate(first) if is_first]
    # of two nodes it is one link
    pairs = list(zip(ranks, ranks[1:] + ranks[:1]))[: len(ranks) - (len(ranks) < 3)]
    mine = []
    with world.place.waiting("measuring the links between nodes"):
        for turn in (pairs[::2], pairs[1::2]):
            mine += [(*pair, _measured(world, *pair)) for pair in turn if world.rank in pair]
    every = world.all_gather(
        "measuring the links between nodes", [link for link in mine if link[0] == world.rank]
    )
    return [link for part in every for link in part]


def _measured(world: World, sender: int, receiver: int) -> float:
    """Return bytes/s, right on the sender. Of these two ranks."""
    data = np.zeros(NUM_BYTES, np.uint8)
    answer = np.zeros(1, np.uint8)
    times = list[float]()
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        if world.rank == sender:
            world.comm.Send([data, MPI.BYTE], receiver)
            world.comm.Recv([answer, MPI.BYTE], receiver)
        else:
            world.comm.Recv([data, MPI.BYTE], sender)
            world.comm.Send([answer, MPI.BYTE], sender)
        times.append(time.perf_counter() - begin)
    return NUM_BYTES / median(times)
