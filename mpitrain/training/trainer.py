"""`mpitrain run`, after mpitrain/training/prepare.py.

Build everything, then loop over steps, log, save, stop.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import torch

from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.actor.memory import measure
from mpitrain.actor.memory_meter import Watch
from mpitrain.actor.step_work import StepRequests, StepResult
from mpitrain.actor.trace import InstructionMeters, Recorder
from mpitrain.cluster import preflight
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.resident import peak_resident, resident
from mpitrain.cluster.status_board import BUSY, WAITING
from mpitrain.comm.base.world import World
from mpitrain.comm.mesh import Mesh
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.data.packed_rows import SourceSampler
from mpitrain.errors import DONE, FAILED, STOPPED_EARLY, StoppedEarly
from mpitrain.optim.rates import learning_rate
from mpitrain.parallel.device_clock import clock_of
from mpitrain.plan.declared.formatting import finite
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.memory_table import MemoryRow, compared
from mpitrain.plan.predict.memory_table import compare as compare_memory
from mpitrain.plan.predict.process_memory import ON_A_GPU, memory_of_process
from mpitrain.plan.predict.snapshot_bytes import copy_bytes, memory_copy_bytes
from mpitrain.plan.predict.staged_bytes import staged_bytes
from mpitrain.plan.settings.log_pace import log_pace
from mpitrain.planner.calibration_file import CalibrationFile
from mpitrain.planner.measured_run import MeasuredRun
from mpitrain.report import run_picture
from mpitrain.report.loggers.logger_children import HURRIED_S, PATIENCE_S
from mpitrain.training import expert_loads
from mpitrain.training.announcements import Announcements
from mpitrain.training.checks.checks import Checks
from mpitrain.training.checks.comm_report import Ledger, RankUsage
from mpitrain.training.checks.spikes import Spikes
from mpitrain.training.checks.stragglers import Stragglers
from mpitrain.training.compile_warmup import practise
from mpitrain.training.early_exit import HURRY, LEAVE, STAY, Leaving
from mpitrain.training.going_on import commands
from mpitrain.training.machine.between_nodes import settled
from mpitrain.training.machine.device_placement import DevicePlacement, way_of_messages
from mpitrain.training.machine.device_placement import place as choose_place
from mpitrain.training.machine.peak_flops import peak_of_all
from mpitrain.training.prepare import PreparedRun
from mpitrain.training.profiling import Profiling
from mpitrain.training.recovery import Recovery, RunCounts
from mpitrain.training.replay.record_request import RecordRequest
from mpitrain.training.run_report import RunReport
from mpitrain.training.run_summary import run_summary, write_summary
from mpitrain.training.saving.in_memory import MemoryCopies
from mpitrain.training.saving.saver import saver_of
from mpitrain.training.side_files import SideFiles
from mpitrain.training.step_rows import StepRows
from mpitrain.training.step_times import StepTimes


def run(
    opened: PreparedRun,
    world: World,
    guard: Guard,
    record: RecordRequest | None = None,
    calibrate: str | None = None,
) -> int:
    """Train what was opened, and return the exit code. Collective over `world`; raises as built() does.

    calibrate: the file of the run's machine, which what it has measured changes.
    """
    calibration = None
    if calibrate is not None:
        machine = opened.plan.config.run.machine
        calibration = world.on_first_rank(
            "looking at --calibrate", lambda: CalibrationFile.require(calibrate, machine)
        )
    with Trainers(opened, world, guard, record) as trainers:
        while (code := trainers.now.train(calibration)) is None:
            trainers.advance()
    return code


class Trainers:
    """The trainers of a run, one after the other, each with a plan of its own.

    Batches (batch.growth) or rows (batch.lengths) of the next one have another size.
    now: the one that trains.
    """

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
        """Free the communicators, and build the trainer of the next step: it resumes from a saved one.

        Collective over all ranks; raises as built() does.
        """
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
) -> Iterator["Trainer"]:
    """Make the communicators and the model, and free the communicators in the end.

    Collective over `world`.
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
    report = RunReport(world.rank, 0, log_pace(config.run))
    way = way_of_messages(placement, world, config.comm.device, limit.seconds)
    with place.at("build", "making the communicators", WAITING):
        mesh = build_mesh(opened.plan, world.comm, place, way, placement.use)
    place.name(f"{mesh} on {os.uname().nodename}", limit.seconds)
    try:
        yield _built(opened, world, mesh, placement, guard, limit, report, record)
    except StoppedEarly:
        mesh.free()
        raise
    with place.at("end", "freeing the communicators", WAITING):
        mesh.free()


def _built(
    opened: PreparedRun,
    world: World,
    mesh: Mesh,
    placement: DevicePlacement,
    guard: Guard,
    limit: Limit,
    report: RunReport,
    record: RecordRequest | None,
) -> "Trainer":
    """Look at the machine, build the model and read the newest checkpoint.

    Collective over `world`; raises as built() does.
    """
    config = opened.plan.config
    place = guard.place
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
        trainer = Trainer(replace(opened, plan=plan), world, mesh, placement, guard, limit, record)
    guard.leave_if_asked(world)
    trainer.recovery.resume()
    guard.leave_if_asked(world)
    return trainer


class Trainer:
    """The loop of one rank.

    code: the exit code, when the run is over before run.steps.
    steps_here: those of this plan (batch.growth, batch.lengths).
    """

    def __init__(
        self,
        opened: PreparedRun,
        world: World,
        mesh: Mesh,
        placement: DevicePlacement,
        guard: Guard,
        limit: Limit,
        record: RecordRequest | None,
    ):
        self.config = config = opened.plan.run_config
        self.rundir = opened.rundir
        self.corpora = opened.corpora
        self.mesh = mesh
        self.placement = placement
        self.device = placement.device
        self.opened = opened
        self.world = world
        self.guard = guard
        self.place = guard.place
        self.limit = limit
        self.bare = resident()
        self.clock = clock_of(self.device)
        mesh.keep_time(self.clock)
        self.recorder = Recorder(range(0), self.clock, InstructionMeters(mesh, self.device, self.clock))
        self.plan = opened.plan
        self.actor = Actor(
            self.plan, mesh, self.device, self.recorder, self.place, compiled=placement.compiled
        )
        self.num_validated = _num_validated(opened)
        self.counts = RunCounts()
        self.steps_here = BatchSizes(config.batch).alike(opened.newest.step + 1, config.run.steps)
        self.code: int | None = None
        self.last_words = ""
        self.urgency = STAY
        self.spikes = Spikes(config.spikes)
        self.report = RunReport(mesh.rank, config.run.steps, log_pace(config.run))
        self.peak = peak_of_all(placement, self.actor.site.dtype, world)
        attended = min(self.corpora.train.attended_length, self.plan.config.data.sequence)
        self._flops = self.plan.flops_per_token(attended) / self.peak.flops
        self._recomputed_flops = self.plan.recomputed_flops_per_token(attended) / self.peak.flops
        self.ledger = Ledger(mesh)
        self.step_times = StepTimes()
        self.stragglers = Stragglers(self.plan, mesh, world, self.report.say)
        self.checks = Checks(self.actor, mesh, world, self.place, self.rundir, self.report.say, record)
        self.rows = StepRows(self.actor, self.corpora.separate, mesh["dp"].rank)
        # read, whether their targets carry loss or not
        self.step_tokens = self.rows.num_sequences * config.data.sequence
        say = self.report.say
        self.side_files = SideFiles(self.actor, self.recorder, world, self.rundir, self.place, say)
        self.profiling = Profiling(self.actor, world, self.rundir, self.place, self.report.say)
        self.watch = Watch(self.actor.stages.values(), self.actor.site.constants())
        self.watched = 0  # the step in which activations are counted
        self.saver = saver_of(self.actor, world, self.place, self.rundir, opened.saved, self.report.say)
        self.memory = MemoryCopies(self.actor, world, self.place, opened.memory, self.report.say)
        self.recovery = Recovery(
            opened, world, self.actor, self.place, self.counts, self.spikes, self.saver, self.report
        )
        self.leaving = Leaving(guard.requests, self.saver.most_bytes)

    # ------------------------------------------------------------ the loop

    def train(self, calibration: CalibrationFile | None = None) -> int | None:
        """Run the steps that are left; return the exit code, the same on all ranks.

        None: the next step has another plan, which resumes from this one, which is saved.
        """
        self.begin()
        with self.report:
            for _ in self.steps():
                pass
        return None if self.is_followed else self.finish(calibration)

    @property
    def is_followed(self) -> bool:
        """Whether the next step is another trainer's, after the last one of this."""
        step = self.counts.step
        return self.code is None and step < self.config.run.steps and step + 1 not in self.steps_here

    def begin(self) -> None:
        """Say what is trained, and settle which steps are traced, recorded and measured.

        Collective over all ranks; raises StoppedEarly.
        """
        for line in self._announcements().lines():
            self.report.say(line)
        self.report.say(self.leaving.announced())
        if self.actor.compiled and self.counts.step < self.config.run.steps:
            practise(
                self.actor,
                self.counts.step + 1,
                self.rows.microbatches(self.corpora.train, self.counts.sequences),
            )
            self.guard.leave_if_asked(self.world)
        self.watched = self.counts.step + 1
        run = self.config.run
        self.side_files.choose(self.counts.step, run.steps, run.trace, run.routing)
        self.profiling.choose(self.counts.step)

    def _announcements(self) -> Announcements:
        return Announcements(
            self.plan,
            self.world,
            self.mesh,
            self.actor,
            self.corpora,
            self.placement,
            self.num_validated,
            self.peak.source,
        )

    def steps(self) -> Iterator[dict]:
        """Run the steps that are left, each when it is asked for, and yield its line of metrics.jsonl.

        Collective over all ranks.
        """
        if self.counts.step == 0:
            self._log({"step": 0, **self.validate(), "time": time.time()})
        self.guard.requests.begin_steps()
        while self.counts.step + 1 in self.steps_here and self.code is None:
            yield self._one_step()

    def finish(self, calibration: CalibrationFile | None = None) -> int:
        """Say how it went, after the last step; return the exit code. Collective over all ranks."""
        code = self._say_how_it_went(calibration)
        with self.place.at("end", "waiting for loggers", BUSY):
            patience_s = {STAY: PATIENCE_S, HURRY: 0.0}.get(self.urgency, HURRIED_S)
            self.report.say(self.opened.loggers.end(patience_s))
        return code

    def _say_how_it_went(self, calibration: CalibrationFile | None) -> int:
        code = DONE if self.code is None else self.code
        self.place.enter("end", "printing the summary")
        self.report.say(self.rundir.lost())
        if code in (DONE, STOPPED_EARLY):  # else they may be all that is left of the last steps
            self.memory.end()
        self.profiling.close()
        if self.urgency == HURRY:
            self.report.say(self.last_words)
            return code
        usages = self.ledger.gather(self.world)
        self.report.say(self.ledger.table(usages))
        self.report.say(self.stragglers.summary())
        most = peak_resident()  # before metrics.jsonl is read, which takes memory
        if self.mesh.rank == 0:
            self.report.say(run_picture.write(self.rundir))
        if code != DONE:
            self.report.say(self.last_words)
            return code
        if self.counts.step >= self.watched:  # else nothing was left to do, and nothing measured
            run, memory = self._report_memory(usages, most)
            if self.mesh.rank == 0:
                self._say_prediction(run, usages, memory, calibration)
        self.report.say(self.saver.gathered)
        self.report.say(self.memory.describe())
        self._say_how_to_go_on()
        self.report.say(self.checks.describe())
        return DONE

    def _say_prediction(
        self,
        run: MeasuredRun,
        usages: list[RankUsage],
        memory: list[MemoryRow],
        calibration: CalibrationFile | None,
    ) -> None:
        """Say what was predicted of a step, and leave what is known at the end in summary.json."""
        from mpitrain.planner.after_run import compare, step_parts  # a run needs no planner before

        self.place.enter("end", "predicting a step", BUSY)
        parts = step_parts(run)
        lines = [compare(run, parts)]
        if calibration is not None:
            from mpitrain.planner.calibrate import calibrate

            lines.append(calibrate(run, calibration, date.today()))
        summary = run_summary(self.plan, usages, self.ledger.num_steps, memory, self.stragglers.named, parts)
        lines.append(write_summary(self.rundir, summary))
        self.report.say("\n".join(filter(None, lines)))

    def _report_memory(
        self, usages: list[RankUsage], resident_most: int | None
    ) -> tuple[MeasuredRun, list[MemoryRow]]:
        """Say what this rank was to hold and what it has; return what the run has measured."""
        rank = self.actor.pp.rank
        shards = self.actor.shards_here
        copies = copy_bytes(self.plan, rank, shards), self.saver.copied_bytes
        in_memory = memory_copy_bytes(self.plan, rank, shards), self.memory.own_bytes
        on_gpu = self.device.type == "cuda"
        staged = 0 if self.mesh.device_aware or not on_gpu else staged_bytes(self.plan, rank)
        predicted = predict(self.plan, shards, on_gpu)[rank]
        measured = measure(self.actor, self.watch)
        process = ON_A_GPU if on_gpu else memory_of_process(self.plan, rank, predicted)
        bytes_held = predicted, measured, copies, process, self.bare, resident_most, on_gpu, staged
        rows = compared(*bytes_held, in_memory)
        self.report.say(compare_memory(rows))
        expected = sum(predicted) + copies[0] + sum(process)
        held = resident_most
        if on_gpu:
            expected = predicted.on_device
            held = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            self.report.say(
                f"GPU of rank 0, MB at most: {held / 1e6:,.2f} allocated, with what it works with; "
                f"{reserved / 1e6:,.2f} reserved by torch"
            )
        run = MeasuredRun(
            self.plan,
            self.step_times.median_s if len(self.step_times) else 0.0,
            len(self.step_times),
            [usage.totals for usage in usages],
            self.ledger.num_steps,
            self.world.node.size,
            self.world.node_cores,
            self.placement.gpu.name if self.placement.gpu else "",
            self.peak.flops / self.world.size,
            expected,
            held,
        )
        return run, rows

    def _one_step(self) -> dict:
        """Run a step, validate, save and log as is due; return its line."""
        step = self.counts.step + 1
        self.leaving.begin_step()
        self.ledger.begin()
        begin = self.clock.mark()
        waited_before_s = self.mesh.progress.waited_s
        lr = learning_rate(self.config, step)
        result = self._compute(step, lr)
        self.place.enter("step", "between two steps")
        step_s = self.clock.seconds(begin, self.clock.mark())
        waited_s = self.mesh.progress.waited_s - waited_before_s
        self._limit_waits(step_s)
        self.step_times.add(step_s)
        self.stragglers.step(step, step_s, waited_s)
        self._count(result)
        line = self._line_of_step(result, lr, step_s)
        self.urgency = result.stop
        line |= self._validate_if_due()
        self._log(line, waited_s / step_s)
        self.side_files.end(step)
        self.profiling.end(step)
        self.leaving.end_step(self.saver.last.took_s)
        self.code = self._check_and_save(result, line.get("val_loss"))
        return line

    def _compute(self, step: int, lr: float) -> StepResult:
        """Read the tokens of a step and run it, recorded and checked as is due."""
        watch = self.watch if step == self.watched else None
        self.place.enter("step", "reading tokens")
        microbatches = self.rows.microbatches(self.corpora.train, self.counts.sequences)
        rows = partial(self.rows.rows, self.corpora.train, self.counts.sequences)
        self.side_files.begin(step)
        pass_runner = self.checks.pass_runner(step, rows, {"lr": lr, "updates": self.counts.updates})
        asked = StepRequests(self.leaving.urgency, self.saver.number, self.spikes.skip_update)
        with self.profiling.step(step):
            return self.actor.run_step(
                step, microbatches, lr, asked=asked, watch=watch, pass_runner=pass_runner
            )

    def _count(self, result: StepResult) -> None:
        """Count a step that is done."""
        self.counts.step += 1
        self.counts.tokens += self.step_tokens
        self.counts.sequences += self.rows.num_sequences
        without = result.skipped or result.spike
        self.counts.updates += not without
        self.counts.skipped += without
        self.saver.advance(result.save_progress)

    def _line_of_step(self, result: StepResult, lr: float, step_s: float) -> dict:
        """Return what metrics.jsonl has of a step besides validation, when its costs are all there."""
        spike = self.spikes.observe(self.counts.step, result.loss)
        self.report.say(spike)
        line = self._line(result, lr, step_s)
        if spike:
            line["spike"] = True  # its loss is a spike (spikes.do)
        if self._is_alone(self.counts.step, result.stop):
            self.actor.settle()
        # seconds that rank 0 waited for other ranks, by rank: the longest
        line["waited_for"] = self.ledger.waits()
        # what each axis with traffic cost rank 0 in the step, by axis
        line["comm"] = self.ledger.end()
        return line | self.saver.lines()

    def _validate_if_due(self) -> dict[str, Any]:
        """Return the loss of validation and the loads of experts, after steps that ask for them.

        Collective over all ranks.
        """
        run = self.config.run
        due = self.counts.step == run.steps or (run.eval_every and self.counts.step % run.eval_every == 0)
        if not due or self.urgency == HURRY:
            return {}
        line: dict[str, Any] = self.validate()
        if self.config.experts.count:
            mine = expert_loads.shares(self.actor)
            shares_of_ranks = self.world.all_gather("the loads of experts", mine)
            line[expert_loads.KEY] = expert_loads.together(shares_of_ranks)
        return line

    def _check_and_save(self, result: StepResult, val_loss: float | None) -> int | None:
        """Check a step, then save it or go back from it as is due; return the exit code if it was the last.

        Collective over all ranks.
        """
        run = self.config.run
        step = self.counts.step
        over = step == run.steps or self.urgency > STAY
        grows = step + 1 not in self.steps_here and not over
        saving = over or grows or bool(run.save_every and step % run.save_every == 0)
        if corruption := self.checks.corruption(step, saving):
            return self._corrupted(corruption)
        last = self.recovery.last_saved() if result.spike and self.config.spikes.do == "rollback" else 0
        if last:
            return self._roll_back(last)
        reason = self._count_skips(result)
        if not reason:
            self._keep(result, val_loss, saving)
        if over or reason:
            return self._end(reason)
        return self._end_of_batch() if grows else None

    def _keep(self, result: StepResult, val_loss: float | None, saving: bool) -> None:
        """Save a step on disk, or copy it in memory, as is due."""
        if saving:
            self._save(result, val_loss)
        elif self.memory.due(self.counts.step):
            self.memory.copy(self.counts.step, self.recovery.meta(None))

    def _end_of_batch(self) -> int | None:
        """Wait for the step that another plan resumes from; return the exit code if it isn't saved."""
        self.saver.finish()
        self.memory.forget()
        last = self.saver.last
        return self._end(last.reason) if last.reason or last.unhealthy else None

    def _is_alone(self, step: int, stop: int) -> bool:
        """Return whether the next step doesn't follow at once.

        Then this step pays for the weights that are still on their way to other ranks. The first step
        of a start pays for its own, too: the table at the end begins with the second.
        """
        run = self.config.run
        check_every = self.config.numerics.check_every
        due = any(period and step % period == 0 for period in (run.eval_every, run.save_every, check_every))
        edge = step == self.watched or step + 1 not in self.steps_here
        return due or edge or self.memory.due(step) or stop > STAY

    def _end(self, reason: str) -> int:
        """Return the exit code after the last step, when nothing is being saved any more.

        reason: why it isn't worth saving.
        """
        self.saver.finish()
        last = self.saver.last
        if reason or last.unhealthy:
            return self._diverged(reason or last.reason)
        if last.reason:
            self.last_words = (
                f"step {self.counts.step} could not be saved: fix that, then run the same command to resume"
            )
            return FAILED
        if self.counts.step < self.config.run.steps:
            self.last_words = self.leaving.describe(self.counts.step)
            return STOPPED_EARLY
        return DONE

    def _corrupted(self, corruption: str) -> int:
        """End a run whose state can't be relied on, without saving it; return the exit code."""
        self.saver.finish()
        self.memory.end()
        self.last_words = (
            f"corrupted after step {self.counts.step}: {corruption}; the last good checkpoint is kept: "
            "leave that node out"
        )
        return FAILED

    def _diverged(self, reason: str) -> int:
        self.memory.end()
        advice = "lower optimizer.lr, or check the data, and run the same command to resume"
        self.last_words = f"diverged: {reason}; the last good checkpoint is kept: {advice}"
        return FAILED

    def _limit_waits(self, step_s: float) -> None:
        """Let waits last as long as this run's steps say."""
        self.limit.took(step_s)
        self.mesh.progress.timeout_s = self.limit.seconds
        self.place.name(self.place.who, self.limit.seconds)

    def _count_skips(self, result: StepResult) -> str:
        """Count the steps that were skipped in a row, and say so.

        Return why the run has to end, if it has to. Alike on all ranks.
        """
        most = self.config.run.max_skips
        if not (result.skipped or result.spike):
            self.counts.skipped_in_a_row = 0
        elif result.num_tokens:  # without a target there is nothing to learn, and nothing is wrong
            self.counts.skipped_in_a_row += 1
        if result.skipped and result.num_tokens:
            limit = f" of at most {most} (run.max_skips)" if most else ""
            self.report.say(
                f"step {self.counts.step} was skipped: its gradients are not finite; "
                f"{self.counts.skipped_in_a_row} in a row{limit}"
            )
        if most and self.counts.skipped_in_a_row >= most:
            return f"{self.counts.skipped_in_a_row} steps were skipped in a row (run.max_skips = {most})"
        return ""

    def validate(self) -> dict[str, Any]:
        """Return the mean loss over the validation sequences, none of them twice, and of each source.

        Nothing if a rank is in a hurry before all are computed.

        Raises StoppedEarly on all ranks if one has to leave before the first step: there is nothing
        to save.
        """
        begin_s = time.monotonic()
        loss = self._validated(self.corpora.validation, self.num_validated)
        sources = {
            name: self._validated(sampler, min(self.num_validated, sampler.num_sequences))
            for name, sampler in self.corpora.validation_of_sources.items()
        }
        if self.urgency == HURRY:
            return {}
        self.leaving.validated(time.monotonic() - begin_s)
        line: dict[str, Any] = {
            "val_loss": loss,  # mean cross-entropy of the validation batches, in nats
        }
        if sources:
            # by source, its loss (run.eval_sources)
            line["evaluations"] = {name: dict(loss=of_source) for name, of_source in sources.items()}
        return line

    def _validated(self, sampler: SourceSampler, most: int) -> float:
        """Return the mean loss of the first sequences, `most` of them; of fewer if a rank is in a hurry."""
        urgency = (
            self.leaving.urgency if self.counts.step else lambda: LEAVE if self.guard.requests.why() else STAY
        )
        totals = []
        with self.place.at("validation", "reading tokens"):
            for first in range(0, most, self.rows.num_sequences):
                if self.urgency == HURRY:
                    break
                microbatches = self.rows.microbatches(sampler, first, most)
                *total, stop = self.actor.evaluate(self.counts.step, microbatches, StepRequests(urgency))
                totals.append(total)
                if stop and self.counts.step == 0:
                    self.guard.leave_if_asked(self.world)
                self.urgency = max(self.urgency, stop)
        return sum(loss for loss, _ in totals) / (sum(count for _, count in totals) or math.nan)

    # --------------------------------------------------------- what the user and other programs see

    def _line(self, result: StepResult, lr: float, step_s: float) -> dict:
        tokens_per_s = self.step_tokens / step_s
        return {
            "step": self.counts.step,  # number of the step; 0 before training, with a validation only
            "loss": result.loss,  # mean cross-entropy of the step's tokens, in nats
            "grad_norm": result.grad_norm,  # norm of all gradients before clipping
            "lr": lr,  # learning rate of the step
            "tokens": self.counts.tokens,  # tokens trained on so far
            # tokens of the data's order read so far, those of steps that were rolled back too
            "read": self.counts.sequences * self.config.data.sequence,
            "tokens_per_s": tokens_per_s,  # of all ranks, in this step
            "step_s": step_s,  # seconds of the step on rank 0
            "time": time.time(),  # when the step was over on rank 0, in seconds since 1970
            # seconds that the model FLOPs of the step take at the peak of all ranks: step_s * mfu
            "theoretical_s": self.step_tokens * self._flops,
            "mfu": tokens_per_s * self._flops,  # model FLOPs utilisation, a share of the peak of all ranks
            # hardware FLOPs utilisation: the same with what memory.recompute computes again
            "hfu": tokens_per_s * (self._flops + self._recomputed_flops),
            "skipped": self.counts.skipped,  # updates left out so far, for gradients or spikes
            # factor of the loss with dynamic loss scaling (fp16)
            **({"loss_scale": self.actor.loss_scale.value} if self.actor.loss_scale.dynamic else {}),
            # most microbatches whose activations a rank held at once
            "peak_in_flight": result.peak_in_flight,
            # rollbacks so far, if there were some (spikes.do)
            **({"rollbacks": self.spikes.rollbacks} if self.spikes.rollbacks else {}),
            **result.metrics,
        }

    def _log(self, line: dict, waited_share: float = 0.0) -> None:
        """Append a line to metrics.jsonl before the next step, and show it.

        It is synced before a checkpoint is committed.
        """
        if self.mesh.rank:
            return
        self.place.enter("step", f"writing {self.rundir.metrics}")
        self.report.say(self.rundir.append_to_metrics(json.dumps(finite(line), allow_nan=False) + "\n"))
        if self.counts.step:
            self.report.say(self.opened.loggers.advance())
        self.place.enter("step", "printing the step")
        if self.counts.step:
            self.report.step(line, waited_share)
        elif "val_loss" in line:
            self.report.say(f"val loss before training {line['val_loss']:.4f}")

    def _say_how_to_go_on(self) -> None:
        path = self.rundir.path
        ranks = (self.mesh.size, self.world.num_nodes)
        self.report.say(
            f"done: {self.counts.step} steps, everything is in {path}\n"
            f"{commands(self.config, path, self.opened.prompt, *ranks)}"
        )

    # ------------------------------------------------------------ checkpoints

    def _save(self, result: StepResult, val_loss: float | None) -> None:
        """Begin to save a step, if it is worth it. Collective over all ranks."""
        scale = self.actor.loss_scale
        if result.num_tokens and (
            not math.isfinite(result.loss) or (result.skipped and not (scale.dynamic and scale.value > 1))
        ):
            self.saver.refuse(self.counts.step, "its loss or its gradients are not finite")
            return
        self.saver.start(self.counts.step, self.recovery.meta(val_loss))

    def _roll_back(self, last: int) -> int | None:
        """Go back to a checkpoint after a spike; return the exit code if the run has to end.

        Collective over all ranks.
        """
        most = self.config.spikes.most
        if most and self.spikes.rollbacks >= most:
            return self._diverged(
                f"{most} rollback{'s were' if most > 1 else ' was'} not enough (spikes.most = {most})"
            )
        self.recovery.roll_back(last)
        self.memory.forget()
        self.recorder.forget(last)
        if self.urgency == STAY:
            return None
        self.last_words = f"stopped after step {last}, which is saved; run the same command to resume"
        return STOPPED_EARLY


def _num_validated(opened: PreparedRun) -> int:
    """Return the number of sequences of a validation."""
    config = opened.plan.run_config
    asked = config.run.eval_batches * BatchSizes(config.batch).at(1)
    corpora = opened.corpora
    return min(asked, corpora.validation.num_sequences) if corpora.by_documents else asked
