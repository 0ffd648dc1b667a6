"""Schedules as they run against schedules as they are simulated, with stages that sleep instead of computing.

    mpirun -n 4 python benchmarks/schedules.py [--times 8,8,8] [--microbatches 8] [--steps 6] [--schedules 1f1b,zbv]

Sleeping stages need no core, so that more ranks than cores don't wait for one another. Programs, messages and the update are real.
Times are milliseconds of F, I and W of a rank's whole share of layers. Each line is a median over the steps: the measured makespan
up to the update, the simulator's from the times that this run measured, and the simulator's from the nominal times alone.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from mpi4py import MPI

from mpitrain import config as settings
from mpitrain.actor.actor import Actor
from mpitrain.actor.stage import Microbatch, Stage
from mpitrain.actor.trace import Recorder, write_trace
from mpitrain.comm.world import NOWHERE, World
from mpitrain.layout.resolve import resolve
from mpitrain.layout.table import table_of
from mpitrain.schedules.measured import costs, predict, read_trace
from mpitrain.schedules.options import Times
from mpitrain.schedules.simulate import simulate_table
from mpitrain.training.trainer import build_mesh

MODEL = ("model.width=64", "model.heads=2", "model.kv_heads=1", "model.ffn=64", "model.tied=false", "data.sequence=64")


def sleeping(times: Times, shares: int) -> type[Stage]:
    """Return a stage that sleeps for its share of `times`, in seconds, and hands on zeros."""

    class Sleeping(Stage):
        def forward(self, index, x, microbatch):
            yield None
            time.sleep(times.forward / shares)
            self.stashes[index] = []
            if self.last:
                self.losses[index] = torch.zeros(())
                return None
            return self.activation().zero_()

        def backward(self, index, grad, part):
            share = 1 if part is None else 1 / len(self.parts)
            yield None
            time.sleep((times.input + times.weight) / shares * share)
            if part in (None, len(self.parts) - 1):
                del self.stashes[index]
            return None if self.first else self.activation().zero_()

        def input_backward(self, index, grad):
            yield None
            time.sleep(times.input / shares)
            del self.stashes[index]
            self.products[index] = []
            return None if self.first else self.activation().zero_()

        def weight_backward(self, index, part):
            yield None
            time.sleep(times.weight / shares * (1 if part is None else 1 / len(self.parts)))
            if part in (None, len(self.parts) - 1):
                del self.products[index]

    return Sleeping


def measure(name: str, times: Times, microbatches: int, steps: int) -> tuple[float, float, float] | None:
    """Return the measured and the two simulated makespans in milliseconds, on rank 0."""
    world = MPI.COMM_WORLD
    sizes = (f"parallel.pp={world.size}", f"batch.global={microbatches}", f"model.layers={2 * world.size}", f"pipeline.schedule={name}")
    config = resolve(settings.load(None, (*MODEL, *sizes)), world.size, 256)
    mesh = build_mesh(config, world)
    recorder = Recorder(range(1, steps + 1))
    shares = config.pipeline.chunks * table_of(config).segments
    actor = Actor(config, mesh, torch.device("cpu"), recorder, sleeping(times, shares))
    rows = torch.zeros((1, config.data.sequence), dtype=torch.int64)
    for step in range(1, steps + 1):
        world.Barrier()
        actor.run_step(step, [Microbatch(rows, rows)] * microbatches * actor.table.segments, 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        write_trace(path, recorder, mesh, World(world, NOWHERE), actor.table)
        mesh.free()
        if world.rank:
            return None
        timelines = read_trace(path.read_text()).timelines
    nominal = simulate_table(actor.table, Times(*(1000 * seconds for seconds in times))).makespan
    return (
        statistics.median(timeline.makespan for timeline in timelines),
        statistics.median(predict(timeline, costs(timeline)).makespan for timeline in timelines),
        nominal,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", default="8,8,8")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--schedules", default="1f1b,interleaved,zb-h1,zbv")
    arguments = parser.parse_args()
    times = Times(*(float(text) / 1000 for text in arguments.times.split(",")))
    for name in arguments.schedules.split(","):
        result = measure(name, times, arguments.microbatches, arguments.steps)
        if result is not None:
            measured, simulated, nominal = result
            print(
                f"{name:15} measured {measured:8.2f} ms  simulated from its own times {simulated:8.2f} ms ({simulated / measured - 1:+.1%})"
                f"  from nominal times {nominal:8.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
