"""`auto`, planned from the trace of a run, beside all named schedules: a model whose stages are uneven.

    mpirun -n 2 python benchmarks/uneven_stages.py [--repeats 5] [--steps 8] [--schedules 1f1b,zbv]

The last stage has a head over a large vocabulary. A traced run of ZB-H1 says what blocks and ends take;
`auto` chooses with these times, and with 1F1B's memory or --memory-limit stashes. Then all take turns in one
process a rank, step by step, in another order every time, so that what else the machine does meets all.
A repeat's figure is its shortest step, as what else the machine does only adds; a ratio is to `auto`'s of
the same repeat. The schedule that `auto` chose is among the named ones: its ratio is the noise.
The second figure is a step played with the processor's time of each instruction, on cores that no one shares.
"""

import argparse
import random
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
from mpitrain.cluster.heap import keep_freed_memory
from mpitrain.comm.base.world import NULL_REPORTER, World
from mpitrain.errors import MpitrainError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules import catalog
from mpitrain.schedules.actions import AT_END, COMPUTE, SENDS, parse
from mpitrain.schedules.play.measured import Costs, predict
from mpitrain.schedules.play.timeline import Timeline

VOCABULARY = 4096
MODEL = (
    "model.width=96",
    "model.heads=4",
    "model.ffn=256",
    "model.tied=false",
    "data.sequence=64",
    "batch.micro=1",
)
WARMUP = 4  # steps
LATENCY_MS = 0.16  # of a message between two cores, as traces of a quiet machine have it


class ProcessorClock:
    """The processor's time of this thread."""

    late = False

    def mark(self) -> float:
        return time.thread_time()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def now(self) -> tuple[float, float]:
        return time.thread_time(), time.thread_time()


class Candidate:
    """A schedule at work."""

    def __init__(self, world: MPI.Comm, *keys: str, recorder: Recorder | None = None):
        p = world.size
        sizes = (f"parallel.pp={p}", f"batch.global={4 * p}", f"model.layers={4 * p}")
        config = resolve(settings.load(None, (*MODEL, *sizes, *keys)), p, VOCABULARY)
        self.plan = plan_of(config)
        self.mesh = build_mesh(self.plan, world)
        self.world = world
        self.recorder = recorder or Recorder(range(WARMUP + 1, 1_000_000), ProcessorClock())
        self.actor = Actor(self.plan, self.mesh, torch.device("cpu"), self.recorder)
        self.name = config.pipeline.schedule
        rows = torch.zeros((1, config.data.sequence), dtype=torch.int64)
        self.microbatches = [Microbatch(rows, rows)] * (4 * p * self.plan.table.segments)
        self.step = 0

    def seconds(self, steps: int) -> float:
        """Return the median time of some steps, of the slowest rank each."""
        times = []
        for _ in range(steps):
            self.step += 1
            self.world.Barrier()
            begin = time.perf_counter()
            self.actor.run_step(self.step, self.microbatches, 1e-3)
            times.append(self.world.allreduce(time.perf_counter() - begin, MPI.MAX))
        return statistics.median(times)

    def played_ms(self) -> float:
        """Play the steps that were recorded with the median time of each instruction. Collective."""
        steps: dict[int, list[tuple[str, float]]] = {}
        for step, name, begin, end in self.recorder.events:
            steps.setdefault(step, []).append((name, 1000 * (end - begin)))
        typical = [(parse(one[0][0]), statistics.median(ms for _, ms in one)) for one in zip(*steps.values())]
        rows = [
            [(action, ms) for action, ms in row if action.kind not in AT_END]
            for row in self.world.allgather(typical)
        ]
        times = {action: ms for row in rows for action, ms in row if action.kind in COMPUTE + SENDS}
        order = Timeline([[action for action, _ in row] for row in rows], [], [])
        return predict(order, Costs(times, LATENCY_MS, 0, (0.0,) * len(rows))).makespan


def traced(world: MPI.Comm, arguments: argparse.Namespace, path: Path) -> None:
    """Run ZB-H1 and write its trace."""
    recorder = Recorder(range(WARMUP + 1, WARMUP + 1 + arguments.steps))
    one = Candidate(world, "pipeline.schedule=zb-h1", recorder=recorder)
    one.seconds(WARMUP + arguments.steps)
    events = gather_events(recorder, one.mesh, World(world, NULL_REPORTER))
    if events is not None:
        works = [stage.work for stage in one.plan.stages]
        write_trace(path, events, one.actor.table, 1, works)
    world.Barrier()
    one.mesh.free()


def names(arguments: argparse.Namespace) -> list[str]:
    """Return the named schedules that train to the same bits."""
    if arguments.schedules:
        return arguments.schedules.split(",")
    return [
        name
        for name, family in catalog.FAMILIES.items()
        if family.copies == 1 and "segments" not in family.takes and "times" not in family.takes
    ]


def measured(
    world: MPI.Comm, arguments: argparse.Namespace, folder: Path
) -> dict[str, tuple[list[float], float]]:
    """Return the shortest step of each repeat, and a played one, of all candidates; `auto` is the first."""
    path = folder / "trace.json"
    traced(world, arguments, path)
    limit = f"pipeline.memory_limit={arguments.memory_limit or world.size}"
    candidates = [Candidate(world, "pipeline.schedule=auto", f"pipeline.trace={path}", limit)]
    for name in names(arguments):
        try:
            candidates.append(Candidate(world, f"pipeline.schedule={name}"))
        except MpitrainError:
            continue  # not defined for this size
    for one in candidates:
        one.seconds(WARMUP)
    found: dict[str, list[float]] = {}
    chance = random.Random(0)
    for _ in range(arguments.repeats):
        steps: dict[str, list[float]] = {}
        for _ in range(arguments.steps):
            turns = list(range(len(candidates)))
            chance.shuffle(turns)
            for number in turns:
                label = candidates[number].name if number else f"auto: {candidates[0].name}"
                steps.setdefault(label, []).append(candidates[number].seconds(1))
        for label, times in steps.items():
            found.setdefault(label, []).append(min(times))
    played = {}
    for number, one in enumerate(candidates):
        label = one.name if number else f"auto: {one.name}"
        played[label] = found[label], one.played_ms()
        one.mesh.free()
    return played


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--schedules", default="")
    parser.add_argument("--memory-limit", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    world = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory() as own:
        found = measured(world, arguments, Path(world.bcast(own)))
        world.Barrier()
    if world.rank:
        return
    (auto, _), *_ = found.values()
    for label, (seconds, played) in sorted(found.items(), key=lambda one: one[1][1]):
        ratios = [one / base for one, base in zip(seconds, auto)]
        print(
            f"{label:24} {1000 * statistics.median(seconds):8.2f} ms  "
            f"{statistics.median(ratios):6.3f} of auto's, {min(ratios):.3f} to {max(ratios):.3f}; "
            f"played {played:7.2f} ms"
        )


if __name__ == "__main__":
    main()
