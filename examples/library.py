"""Use mpitrain as a library under mpirun: a mesh, a sum over an axis, a schedule that is proved and played.

mpirun -n 2 python examples/library.py
"""

import numpy as np
from mpi4py import MPI

from mpitrain import config
from mpitrain.comm.base.grid import Grid
from mpitrain.comm.collectives import all_reduce
from mpitrain.comm.mesh import Mesh
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules.catalog import build
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.proof.check import check_table


def sum_over_ranks(world: MPI.Intracomm) -> float:
    """Sum the numbers of the ranks over an axis `dp`, in a fixed order."""
    mesh = Mesh(world, Grid({"dp": world.size}))
    x_P = np.full(4, world.rank + 1, dtype=np.float32)
    all_reduce(x_P, mesh["dp"]).wait()  # MPI owns x_P until then
    mesh.free()
    return float(x_P[0])


def makespan(name: str, num_ranks: int, num_microbatches: int) -> float:
    """Build a schedule, prove it, and play it with unit times."""
    table = build(name, num_ranks, num_microbatches)
    check_table(table)
    return simulate_table(table).makespan


def parameters(num_ranks: int) -> int:
    """Plan a configuration on some ranks, and count its parameters."""
    asked = config.load(None, ["model.preset=llama3-8b", "parallel.tp=2"])
    plan = plan_of(resolve(asked, num_ranks, vocab=128_256))
    return sum(spec.numel for spec in plan.parameters())


def main() -> None:
    """Print what each of them gives, on the first rank."""
    world = MPI.COMM_WORLD
    total = sum_over_ranks(world)
    assert total == world.size * (world.size + 1) / 2, total
    if world.rank == 0:
        print(f"sum over {world.size} ranks: {total:g}")
        print(f"zb-h1 on 4 ranks, 8 microbatches: {makespan('zb-h1', 4, 8):g} ticks")
        print(f"llama3-8b: {parameters(8):,} parameters")


if __name__ == "__main__":
    main()
