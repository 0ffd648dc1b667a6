"""Clocks of nodes, compared: time.perf_counter() counts from another moment on each."""

import time

from mpitrain.comm.base.library import host
from mpitrain.comm.base.world import World

ROUNDS = 20  # of the exchange that compares clocks; the fastest counts


def offset_to_first_rank(world: World) -> float:
    """Return what to add to this rank's clock to get rank 0's; 0 on rank 0's host. Collective.

    As NTP does: rank 0's answer is taken for the middle of the fastest of several rounds.
    """
    comm = world.comm
    hosts = comm.allgather(host())
    best = (float("inf"), 0.0)
    for rank in [rank for rank, other in enumerate(hosts) if other != hosts[0]]:
        for _ in range(ROUNDS):
            if comm.rank == 0:
                comm.recv(source=rank)
                comm.send(time.perf_counter(), dest=rank)
            elif comm.rank == rank:
                asked = time.perf_counter()
                comm.send(None, dest=0)
                theirs = comm.recv(source=0)
                answered = time.perf_counter()
                best = min(best, (answered - asked, theirs - (asked + answered) / 2))
    return best[1]
