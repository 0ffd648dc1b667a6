"""`mpitrain run`, after prepare.py: build everything and train; again where batches or rows grow."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from mpitrain.actor.communicators import build_mesh
from mpitrain.cluster import preflight
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.status_board import BUSY, WAITING
from mpitrain.comm.base.world import World
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import StoppedEarly
from mpitrain.plan.settings.log_pace import log_pace
from mpitrain.planner.calibration_file import CalibrationFile
from mpitrain.training.machine.between_nodes import settled
from mpitrain.training.machine.device_placement import DevicePlacement, way_of_messages
from mpitrain.training.machine.device_placement import place as choose_place
from mpitrain.training.replay.record_request import RecordRequest
from mpitrain.training.run_end import finish
from mpitrain.training.run_opening import PreparedRun
from mpitrain.training.run_report import RunReport
from mpitrain.training.trainer import Trainer


def run(
    opened: PreparedRun, world: World, guard: Guard, record: RecordRequest | None, calibrate: str | None
) -> int:
    """Train what was opened, and return the exit code. Collective over `world`; raises as built() does.

    calibrate: the file of the run's machine, which what it has measured changes.
    """
    calibration = None
    if calibrate is not None:
        require = partial(CalibrationFile.require, calibrate, opened.plan.config.run.machine)
        calibration = world.on_first_rank("looking at --calibrate", require)
    with Trainers(opened, world, guard, record) as trainers:
        trainers.now.train()
        while trainers.now.is_followed:
            trainers.advance()
            trainers.now.train()
        return finish(trainers.now, calibration)


class Trainers:
    """A run's trainers, each with its plan (batch.growth, batch.lengths). now: the active one."""

    def __init__(self, opened: PreparedRun, world: World, guard: Guard, record: RecordRequest | None = None):
        self._opened = opened
        self._world, self._guard, self._record = world, guard, record
        self._stack = ExitStack()
        self.now: Trainer

    def __enter__(self) -> "Trainers":
        """Build the first one. Collective over all ranks; raises as built() does."""
        self._build()
        return self

    def __exit__(self, *error: Any) -> bool:
        return bool(self._stack.__exit__(*error))

    def advance(self) -> None:
        """Build the trainer of the next step, which resumes from a saved one. Collective."""
        self._stack.close()
        opened, counts = self._opened, self.now.counts
        newest = opened.saved._replace(step=counts.step, folder=opened.rundir.checkpoints)
        passed = counts.sequences, self.now.spikes.state
        self._opened = replace(opened, newest=newest, saved=newest, notes=[], passed=passed)
        self._build()

    def _build(self) -> None:
        self.now = self._stack.enter_context(built(self._opened, self._world, self._guard, self._record))


@contextmanager
def built(
    opened: PreparedRun, world: World, guard: Guard, record: RecordRequest | None = None
) -> Iterator[Trainer]:
    """Make the communicators and the model, and free the communicators in the end. Collective.

    record: which rank and step to write to a file.
    Raises, alike on all ranks, InputError if a device or a checkpoint isn't what the configuration
    needs, and StoppedEarly if one has to leave before the first step.
    """
    opened = replace(opened, plan=opened.plan.at_step(opened.newest.step + 1))
    config = opened.plan.config
    place = guard.place
    guard.leave_if_asked(world)
    place.enter("build", "looking for the device")
    placement = choose_place(opened.plan, world)
    place.enter("build", "finding out whether MPI takes device buffers")
    limit = Limit(config.comm.timeout_s)
    way = way_of_messages(placement, world, config.comm.device, limit.seconds)
    with place.at("build", "making the communicators", WAITING):
        mesh = build_mesh(opened.plan, world.comm, place, way, placement.use)
    place.name(f"{mesh} on {os.uname().nodename}", limit.seconds)
    try:
        yield _built(opened, world, mesh, placement, guard, record)
    except StoppedEarly:
        mesh.free()
        raise
    except Exception:
        world.in_flight = mesh.progress.abandon()
        raise
    with place.at("end", "freeing the communicators", WAITING):
        mesh.free()


def _built(
    opened: PreparedRun,
    world: World,
    mesh: Mesh,
    placement: DevicePlacement,
    guard: Guard,
    record: RecordRequest | None,
) -> Trainer:
    """Look at the machine, build the model, read the newest checkpoint. Collective over `world`."""
    config = opened.plan.config
    place = guard.place
    report = RunReport(world.rank, 0, log_pace(config.run))
    if config.run.preflight != "off":
        with place.at("build", "looking at space, clocks and devices", BUSY):
            device = str(placement.gpu or "CPU")
            measure = config.run.preflight == "full"
            report.say(preflight.describe(world, opened.plan, opened.rundir.path, device, measure=measure))
    with place.at("build", "measuring links between nodes", BUSY):
        plan, why = settled(opened.plan, world, placement)
        report.say(why)
    guard.leave_if_asked(world)
    with place.at("build", "building the model", BUSY):
        trainer = Trainer(replace(opened, plan=plan), world, mesh, placement, guard, record)
    guard.leave_if_asked(world)
    trainer.recovery.resume()
    guard.leave_if_asked(world)
    return trainer
