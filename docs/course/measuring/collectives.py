"""Count what each collective sends, on one node and on two.

    mpirun -n 4 python docs/course/measuring/collectives.py

Prints a JSON list of [operation, ranks a node, bytes of the buffer, bytes sent by rank 0, messages
sent by rank 0, bytes that leave the node].
"""

import json
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpitrain.comm import collectives
from mpitrain.comm.axis import Axis
from mpitrain.comm.base.grid import Grid
from mpitrain.comm.mesh import Mesh

LENGTH = 1 << 18  # 1 MiB of fp32
SHORT = 256  # 1 KiB: sums go another way


def main() -> None:
    world = MPI.COMM_WORLD
    rows = []
    for nodes in (1, 2):
        ranks = world.size // nodes
        places = [rank // ranks for rank in range(world.size)]
        mesh = Mesh(world, Grid({"dp": world.size}), transport="messages", timeout_s=60, nodes=places)
        rows += [[name, ranks, *_counted(mesh["dp"], run)] for name, run in _operations(mesh["dp"]).items()]
        mesh.free()
    if world.rank == 0:
        print(json.dumps(rows))


def _operations(axis: Axis) -> dict[str, Callable[[], int]]:
    """Return what runs each operation and returns the bytes of its buffer."""
    x = np.ones(LENGTH, np.float32)
    part = np.ones(LENGTH // axis.size, np.float32)

    def started(function: Callable, buffer: np.ndarray, *further: object) -> Callable[[], int]:
        def run() -> int:
            function(buffer, axis, *further).wait()
            return x.nbytes if buffer is part else buffer.nbytes

        return run

    return {
        "all_reduce": started(collectives.all_reduce, x.copy()),
        "all_reduce, short": started(collectives.all_reduce, x[:SHORT].copy()),
        "reduce_scatter": started(collectives.reduce_scatter, x),
        "all_gather": started(collectives.all_gather, part, x.copy()),
        "all_to_all": started(collectives.all_to_all, x),
        "broadcast": started(collectives.broadcast, x.copy(), 0),
        "shift": started(collectives.shift, x),
    }


def _counted(axis: Axis, run: Callable[[], int]) -> list[int]:
    """Return bytes of the buffer, and of rank 0 bytes, messages and bytes to other nodes."""
    before = axis.account.read()
    far_before = axis.far.account.read() if axis.far is not None else None
    num_bytes = run()
    used = axis.account.read().minus(before)
    across = axis.far.account.read().minus(far_before).num_bytes if far_before is not None else 0
    return [num_bytes, used.num_bytes, used.messages, across]


if __name__ == "__main__":
    main()
