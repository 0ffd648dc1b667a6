"""What it costs to compare replicas (numerics.check_every) and to compute a step twice
(numerics.rerun_every), beside a step.

    mpirun -n 2 python benchmarks/checks.py --set model.preset=reference --set data.sequence=256
        --set batch.global=8

Prints medians of some steps, on rank 0, in milliseconds.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from mpi4py import MPI

from mpitrain import config as settings
from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.comm.base.world import NULL_REPORTER, World, start
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.training.checks.replicas import different
from mpitrain.training.checks.rerun import RecomputeCheck

REPEATS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    overrides = parser.parse_args().overrides
    start()
    torch.set_num_threads(1)
    world = World(MPI.COMM_WORLD, NULL_REPORTER)
    config = resolve(settings.load(None, overrides), world.size, 256)
    plan = plan_of(config)
    mesh = build_mesh(plan, world.comm)
    actor = Actor(plan, mesh, torch.device("cpu"))
    rows = torch.from_numpy(
        np.random.default_rng(1).integers(0, 256, (config.batch.global_, config.data.sequence + 1))
    )
    microbatches = actor.cutter.cut(rows.chunk(config.parallel.dp)[mesh["dp"].rank])
    done = []

    def step(**more) -> None:
        done.append(1)
        actor.run_step(len(done), microbatches, 1e-4, **more)

    ways = {
        "a step": step,
        "a step twice": lambda: step(pass_runner=RecomputeCheck(actor, world)),
        "comparing replicas": lambda: different(actor, world),
    }
    step()
    times = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            world.comm.Barrier()
            begin = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begin)
    if world.rank == 0:
        for name, found in times.items():
            print(f"{name:20}{statistics.median(found) * 1e3:10.1f} ms")
    mesh.free()


if __name__ == "__main__":
    main()
    MPI.Finalize()
