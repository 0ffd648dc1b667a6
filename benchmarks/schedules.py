"""Schedules as they run against schedules as they are simulated, with stages that sleep instead of computing.

    mpirun -n 4 python benchmarks/schedules.py [--times 8,8,8] [--microbatches 8] [--steps 6]
        [--schedules 1f1b,zbv]

Sleeping stages need no core, so that more ranks than cores don't wait for one another. Programs,
messages and the update are real. Times are milliseconds of F, I and W of a rank's whole share of
layers. Each line is a median over the steps: the measured makespan up to the update, the
simulator's from the times that this run measured, and the simulator's from the nominal times alone.
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
from mpitrain.actor.communicators import build_mesh
from mpitrain.actor.stage import Microbatch
from mpitrain.actor.trace import Recorder, gather_events, write_trace
from mpitrain.comm.base.world import NULL_REPORTER, World
from mpitrain.model.families.catalog import plan_of
from mpitrain.parallel.walk import WeightGradients
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules.options import Times
from mpitrain.schedules.play.measured import costs, predict, read_trace
from mpitrain.schedules.play.simulate import simulate_table

MODEL = (
    "model.width=64",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=64",
    "model.tied=false",
    "data.sequence=64",
)


class Sleep:
    """An item that sleeps for its part of `times`, in seconds, and hands on zeros."""

    def __init__(self, times: Times, shape: tuple[int, ...], *, first: bool, last: bool):
        self.times = times
        self.shape = shape
        self.first = first
        self.last = last

    def forward(self, x, context):
        yield None
        time.sleep(self.times.forward)
        return torch.zeros(() if self.last else self.shape), None

    def backward(self, saved, grad, later):
        yield None
        time.sleep(self.times.input)
        later(WeightGradients([self]))
        return None if self.first else torch.zeros(self.shape)

    def add(self) -> None:
        """Compute the weight gradients."""
        time.sleep(self.times.weight)

    def tensors(self):
        return iter(())


def sleeping(times: Times, shares: int):
    """Return what builds stages that sleep for their share of `times`."""

    def build(stage, parameters, site):
        num_blocks = len(stage.blocks)
        each = Times(*(seconds / shares / num_blocks for seconds in times))
        shape = site.plan.activation_shape()
        return [
            [Sleep(each, shape, first=stage.first and n == 0, last=stage.last and n == num_blocks - 1)]
            for n in range(num_blocks)
        ]

    return build


def measure(name: str, times: Times, microbatches: int, steps: int) -> tuple[float, float, float] | None:
    """Return the measured and the two simulated makespans in milliseconds, on rank 0."""
    world = MPI.COMM_WORLD
    sizes = (
        f"parallel.pp={world.size}",
        f"batch.global={microbatches}",
        f"model.layers={2 * world.size}",
        f"pipeline.schedule={name}",
    )
    config = resolve(settings.load(None, (*MODEL, *sizes)), world.size, 256)
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    recorder = Recorder(range(1, steps + 1))
    shares = config.pipeline.chunks * plan.table.segments
    actor = Actor(plan, mesh, torch.device("cpu"), recorder, build=sleeping(times, shares))
    rows = torch.zeros((1, config.data.sequence), dtype=torch.int64)
    for step in range(1, steps + 1):
        world.Barrier()
        actor.run_step(step, [Microbatch(rows, rows)] * microbatches * actor.table.segments, 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        events = gather_events(recorder, mesh, World(world, NULL_REPORTER))
        mesh.free()
        if events is None:
            return None
        write_trace(path, events, actor.table, num_replicas=1)
        timelines = read_trace(path.read_text()).timelines
    nominal = simulate_table(actor.table, Times(*(1000 * seconds for seconds in times))).makespan
    return (
        statistics.median(timeline.makespan for timeline in timelines),
        statistics.median(predict(timeline, costs(timeline)).makespan for timeline in timelines),
        nominal,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
                f"{name:15} measured {measured:8.2f} ms  simulated from its own times {simulated:8.2f} ms "
                f"({simulated / measured - 1:+.1%})  from nominal times {nominal:8.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
