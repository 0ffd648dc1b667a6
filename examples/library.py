"""Use mpitrain as a library under mpirun: a run that is stepped, a sum, a schedule that is played, a plan.

mpirun -n 2 python examples/library.py
"""

import numpy as np

from mpitrain import api, config
from mpitrain.comm.base.grid import Grid
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.collectives import all_reduce
from mpitrain.comm.mesh import Mesh
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules.catalog import build
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.proof.check import check_table

SMALL = (
    "model.layers=2", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn=64", "run.steps=3",
    "run.dir=runs/library",
)  # fmt: skip


def sum_over_ranks(num_ranks: int) -> float:
    """Sum a number of each rank over an axis of a mesh of one's own, in a fixed order."""
    mesh = Mesh(MPI.COMM_WORLD, Grid({"dp": num_ranks}))
    x_P = np.full(4, mesh.rank + 1, dtype=np.float32)
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
    with api.open_run(None, *SMALL) as run:
        losses = [line["loss"] for line in run.steps()]
        embedding = run.array("parameters/embedding.weight")
        total = sum_over_ranks(run.mesh.size)
        if run.rank == 0:
            print(f"losses: {losses}; embedding: {embedding.shape}; sum over ranks: {total:g}")
            print(f"zb-h1 on 4 ranks, 8 microbatches: {makespan('zb-h1', 4, 8):g} ticks")
            print(f"llama3-8b: {parameters(8):,} parameters")


if __name__ == "__main__":
    main()
