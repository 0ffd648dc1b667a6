"""The loop over steps on one rank: compute, validate, log, check, save, stop. trainers.py builds it."""

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from mpitrain.actor.actor import Actor
from mpitrain.actor.memory_meter import Watch
from mpitrain.actor.step_work import StepRequests, StepResult
from mpitrain.actor.trace import InstructionMeters, Recorder
from mpitrain.cluster import unhealthy_nodes
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.resident import resident
from mpitrain.comm.base.world import World
from mpitrain.comm.mesh import Mesh
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.errors import DONE, FAILED, STOPPED_EARLY
from mpitrain.optim.rates import learning_rate
from mpitrain.parallel.device_clock import clock_of
from mpitrain.plan.declared.formatting import finite
from mpitrain.plan.settings.log_pace import log_pace
from mpitrain.training.announcements import Announcements
from mpitrain.training.checks.checks import Checks
from mpitrain.training.checks.comm_report import Ledger
from mpitrain.training.checks.replicas import Corruption
from mpitrain.training.checks.spikes import Spikes
from mpitrain.training.checks.stragglers import Stragglers
from mpitrain.training.compile_warmup import warm_up
from mpitrain.training.early_exit import HURRY, STAY, Leaving
from mpitrain.training.machine.device_placement import DevicePlacement
from mpitrain.training.machine.peak_flops import peak_of_all
from mpitrain.training.metrics_line import MetricsLine, expert_loads
from mpitrain.training.profiling import Profiling
from mpitrain.training.recovery import Recovery, RunCounts
from mpitrain.training.replay.record_request import RecordRequest
from mpitrain.training.run_opening import PreparedRun
from mpitrain.training.run_report import RunReport
from mpitrain.training.saving.in_memory import MemoryCopies
from mpitrain.training.saving.saver import Saver
from mpitrain.training.side_files import SideFiles
from mpitrain.training.step_rows import StepRows
from mpitrain.training.validation import Validation

REMEMBERED = 1000  # steps whose seconds are kept


class Trainer:
    """The loop of one rank over the steps of one plan. code: the exit code, once it is over."""

    def __init__(
        self,
        opened: PreparedRun,
        world: World,
        mesh: Mesh,
        placement: DevicePlacement,
        guard: Guard,
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
        self.limit = Limit(config.comm.timeout_s)
        self.bare = resident()
        self.clock = clock_of(self.device)
        mesh.keep_time(self.clock)
        self.recorder = Recorder(range(0), self.clock, InstructionMeters(mesh, self.device, self.clock))
        self.plan = opened.plan
        self.actor = Actor(
            self.plan, mesh, self.device, self.recorder, self.place, compiled=placement.compiled
        )
        self.counts = RunCounts()
        self.steps_here = BatchSizes(config.batch).alike(opened.newest.step + 1, config.run.steps)
        self.code: int | None = None
        self.last_words = ""
        self.urgency = STAY
        self.spikes = Spikes(config.spikes)
        self.report = RunReport(mesh.rank, config.run.steps, log_pace(config.run))
        say = self.report.say
        self.peak = peak_of_all(placement, self.actor.site.dtype, world)
        self.ledger = Ledger(mesh)
        self.steps_s = deque[float](maxlen=REMEMBERED)  # of the last steps but for the first
        self.stragglers = Stragglers(self.plan, mesh, world, say)
        self.checks = Checks(self.actor, world, self.rundir, say, record)
        self.rows = StepRows(self.actor, self.corpora.separate, mesh["dp"].rank)
        self.step_tokens = self.rows.num_sequences * config.data.sequence
        attended_length = self.corpora.train.attended_length
        self._metrics = MetricsLine(self.actor, self.step_tokens, attended_length, self.peak.flops)
        self.side_files = SideFiles(self.actor, world, self.rundir, say)
        self.profiling = Profiling(self.actor, world, self.rundir, say)
        self.watch = Watch(self.actor.stages.values(), self.actor.site.constants())
        self.watched = 0  # the step in which activations are counted
        self.saver = Saver(self.actor, world, self.rundir, opened.saved, say)
        self.memory = MemoryCopies(self.actor, world, opened.memory, say)
        self.recovery = Recovery(opened, world, self.actor, self.counts, self.spikes, self.saver, self.report)
        self.leaving = Leaving(guard.requests, self.saver.most_bytes)
        self.validation = Validation(opened, self.actor, self.rows, world, guard, self.leaving)

    # ------------------------------------------------------------ the loop

    def train(self) -> None:
        """Run the steps that are left of this plan. Collective over all ranks."""
        self.begin()
        with self.report:
            for _ in self.steps():
                pass

    @property
    def is_followed(self) -> bool:
        """Whether the next step is another trainer's, after the last one of this."""
        step = self.counts.step
        return self.code is None and step < self.config.run.steps and step + 1 not in self.steps_here

    def begin(self) -> None:
        """Say what is trained, and choose steps to trace. Collective; raises StoppedEarly."""
        what = self.corpora, self.placement, self.validation, self.peak
        for line in Announcements(self.world, self.actor, *what).lines():
            self.report.say(line)
        self.report.say(self.leaving.announced())
        if self.actor.compiled and self.counts.step < self.config.run.steps:
            microbatches = self.rows.microbatches(self.corpora.train, self.counts.sequences)
            warm_up(self.actor, self.counts.step + 1, microbatches)
            self.guard.leave_if_asked(self.world)
        self.watched = self.counts.step + 1
        run = self.config.run
        self.side_files.choose(self.counts.step, run.steps, run.trace, run.routing)
        self.profiling.choose(self.counts.step)

    def steps(self) -> Iterator[dict]:
        """Run the steps that are left, each when it is asked for; yield its line. Collective."""
        if self.counts.step == 0:
            self._log({"step": 0, **self.validate(), "time": time.time()})
        self.guard.requests.begin_steps()
        while self.counts.step + 1 in self.steps_here and self.code is None:
            yield self._one_step()

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
        self.limit.took(step_s)  # waits last as long as this run's steps say
        self.mesh.progress.timeout_s = self.limit.seconds
        self.place.name(self.place.who, self.limit.seconds)
        if step != self.watched:  # the first of a start is never typical
            self.steps_s.append(step_s)
        self.stragglers.step(step, step_s, waited_s)
        self._leave_if_slow()
        self._count(result)
        line = self._line_of_step(result, lr, step_s, waited_s)
        self.urgency = result.stop
        line |= self._validate_if_due()
        self._log(line, waited_s / step_s)
        self.side_files.end(step)
        self.profiling.end(step)
        self.leaving.end_step(self.saver.last.took_s)
        self.code = self._check_and_save(result, line)
        return line

    def _compute(self, step: int, lr: float) -> StepResult:
        """Read the tokens of a step and run it, recorded and checked as is due."""
        watch = self.watch if step == self.watched else None
        self.place.enter("step", "reading tokens")
        begin_s = time.perf_counter()
        microbatches = self.rows.microbatches(self.corpora.train, self.counts.sequences)
        self._reading_s = time.perf_counter() - begin_s
        if step + 1 in self.steps_here:
            self.rows.read_ahead(self.corpora.train, self.counts.sequences + self.rows.num_sequences)
        rows = partial(self.rows.rows, self.corpora.train, self.counts.sequences)
        self.side_files.begin(step)
        pass_runner = self.checks.pass_runner(step, rows, {"lr": lr, "updates": self.counts.updates})
        asked = StepRequests(self.leaving.urgency, self.saver.number, self.spikes.skip_update)
        checks = dict(asked=asked, watch=watch, pass_runner=pass_runner)
        with self.profiling.step(step):
            return self.actor.run_step(step, microbatches, lr, **checks)

    def _count(self, result: StepResult) -> None:
        self.counts.step += 1
        self.counts.tokens += self.step_tokens
        self.counts.sequences += self.rows.num_sequences
        without = result.skipped or result.spike
        self.counts.updates += not without
        self.counts.skipped += without
        self.saver.advance(result.save_progress)

    def _line_of_step(self, result: StepResult, lr: float, step_s: float, waited_s: float) -> dict:
        """Return what metrics.jsonl has of a step besides validation, when its costs are all there."""
        spike = self.spikes.observe(self.counts.step, result.loss)
        self.report.say(spike)
        line = self._metrics.of_step(result, self.counts, self.spikes.rollbacks, lr, step_s)
        if spike:
            line["spike"] = True  # its loss is a spike (spikes.do)
        if self._is_alone(self.counts.step, result.stop):
            self.actor.settle()
        # seconds that rank 0 stood still in the step: for messages, and while it read the tokens (data)
        line["idle"] = dict(messages=waited_s, data=self._reading_s)
        # seconds that rank 0 waited for other ranks, by rank: the longest
        line["waited_for"] = self.ledger.waits()
        # what each axis with traffic cost rank 0 in the step, by axis
        line["comm"] = self.ledger.end()
        return line | self.saver.lines()

    def _validate_if_due(self) -> dict[str, Any]:
        """Return the loss of validation and loads of experts, if the step is due. Collective."""
        run = self.config.run
        due = self.counts.step == run.steps or (run.eval_every and self.counts.step % run.eval_every == 0)
        if not due or self.urgency == HURRY:
            return {}
        line: dict[str, Any] = self.validate()
        if self.config.experts.count:
            # with a validation: by block, the share that each expert had of the choices of the step
            line["expert_loads"] = expert_loads(self.actor, self.world)
        return line

    def _check_and_save(self, result: StepResult, line: Mapping[str, Any]) -> int | None:
        """Check a step, save it or go back; return the exit code if it was the last. Collective."""
        run = self.config.run
        step = self.counts.step
        over = step == run.steps or self.urgency > STAY
        grows = step + 1 not in self.steps_here and not over
        saving = over or grows or bool(run.save_every and step % run.save_every == 0)
        corruption = self.checks.corruption(step, saving)
        if corruption.text:
            return self._corrupted(corruption)
        last = self.recovery.last_saved() if result.spike and self.config.spikes.do == "rollback" else 0
        if last:
            return self._roll_back(last)
        reason = self._count_skips(result)
        if not reason:
            self._keep(result, line, saving, is_followed=not (over or grows))
        if over or reason:
            return self._end(reason)
        return self._end_of_batch() if grows else None

    def _keep(self, result: StepResult, line: Mapping[str, Any], saving: bool, is_followed: bool) -> None:
        """Copy a step in memory and save it as is due; both, as others follow before a commit."""
        if is_followed and self.memory.due(self.counts.step):
            self.memory.copy(self.counts.step, self.recovery.meta({}))
        if saving:
            self._save(result, line)

    def _end_of_batch(self) -> int | None:
        """Wait for the step that another plan resumes from; return the exit code if it isn't saved."""
        self.saver.finish()
        self.memory.forget()
        last = self.saver.last
        return self._end(last.reason) if last.reason or last.unhealthy else None

    def _is_alone(self, step: int, stop: int) -> bool:
        """Return whether the next step doesn't follow at once, or this is a start's first.

        Then this step pays for the weights that are on their way: its time isn't another's.
        """
        run = self.config.run
        check_every = self.config.numerics.check_every
        due = any(period and step % period == 0 for period in (run.eval_every, run.save_every, check_every))
        edge = step == self.watched or step + 1 not in self.steps_here
        return due or edge or stop > STAY

    def _end(self, reason: str) -> int:
        """Return the exit code, once the last step is saved. reason: why it isn't worth that."""
        self.saver.finish()
        last = self.saver.last
        if reason or last.unhealthy:
            return self._diverged(reason or last.reason)
        if last.reason:
            advice = "fix that, then run the same command to resume"
            self.last_words = f"step {self.counts.step} could not be saved: {advice}"
            return FAILED
        if self.counts.step < self.config.run.steps:
            self.last_words = self.leaving.describe(self.counts.step)
            return STOPPED_EARLY
        return DONE

    def _corrupted(self, corruption: Corruption) -> int:
        """End a run whose state can't be relied on, without saving it; return the exit code."""
        self.saver.finish()
        self.memory.end()
        what = f"corrupted after step {self.counts.step}: {corruption.text}"
        self.last_words = f"{what}; {self._kept()}: leave that node out"
        self._note_unhealthy(corruption.nodes, corruption.text)
        return FAILED

    def _kept(self) -> str:
        saved = self.guard.place.saved
        return f"the checkpoint of step {saved} is kept" if saved > 0 else "no step is saved yet"

    def _leave_if_slow(self) -> None:
        """Leave with a checkpoint if a node is slow and another can take its place. Alike on all ranks."""
        node = self.stragglers.unhealthy_node
        if node and unhealthy_nodes.num_spares() and not self.leaving.reason:
            self.leaving.ask(f"as node {node} is slow (recovery.replace_slow)")
            self._note_unhealthy([node], "it is slow")

    def _note_unhealthy(self, nodes: Iterable[str], why: str) -> None:
        """Have `mpitrain supervise --nodes` leave nodes out at the next start."""
        if self.mesh.rank:
            return
        try:
            unhealthy_nodes.note(self.rundir, self.counts.step, nodes, why)
        except OSError as error:
            self.report.say(f"{self.rundir.unhealthy} can't be written: {error.strerror}")

    def _diverged(self, reason: str) -> int:
        self.memory.end()
        advice = "lower optimizer.lr, or check the data, and run the same command again"
        self.last_words = f"diverged: {reason}; {self._kept()}: {advice}"
        return FAILED

    def _count_skips(self, result: StepResult) -> str:
        """Count the steps skipped in a row; return why the run has to end. Alike on all ranks."""
        most = self.config.run.max_skips
        if not (result.skipped or result.spike):
            self.counts.skipped_in_a_row = 0
        elif result.num_tokens:  # without a target there is nothing to learn, and nothing is wrong
            self.counts.skipped_in_a_row += 1
        if result.skipped and result.num_tokens:
            limit = f" of at most {most} (run.max_skips)" if most else ""
            what = f"step {self.counts.step} was skipped: its gradients are not finite"
            self.report.say(f"{what}; {self.counts.skipped_in_a_row} in a row{limit}")
        if most and self.counts.skipped_in_a_row >= most:
            return f"{self.counts.skipped_in_a_row} steps were skipped in a row (run.max_skips = {most})"
        return ""

    def validate(self, tasks: bool = True) -> dict[str, Any]:
        """Return what metrics.jsonl has of a validation, see Validation. Collective over all ranks."""
        line = self.validation.validate(self.counts.step, self.urgency, tasks)
        self.urgency = self.validation.urgency
        return line

    def _log(self, line: dict, waited_share: float = 0.0) -> None:
        """Append a line to metrics.jsonl, which is synced before a commit, and show it."""
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

    # ------------------------------------------------------------ checkpoints

    def _save(self, result: StepResult, line: Mapping[str, Any]) -> None:
        """Begin to save a step, if it is worth it. Collective over all ranks."""
        scale = self.actor.loss_scale
        is_lost = result.skipped and not (scale.dynamic and scale.value > 1)
        if result.num_tokens and (is_lost or not math.isfinite(result.loss)):
            self.saver.refuse(self.counts.step, "its loss or its gradients are not finite")
        else:
            self.saver.start(self.counts.step, self.recovery.meta(line))

    def _roll_back(self, last: int) -> int | None:
        """Go back to a checkpoint after a spike; return the code if the run ends. Collective."""
        most = self.config.spikes.most
        if most and self.spikes.rollbacks >= most:
            rollbacks = f"{most} rollback{'s were' if most > 1 else ' was'}"
            return self._diverged(f"{rollbacks} not enough (spikes.most = {most})")
        self.recovery.roll_back(last)
        self.memory.forget()
        self.recorder.forget(last)
        if self.urgency == STAY:
            return None
        self.last_words = f"stopped after step {last}, which is saved; run the same command to resume"
        return STOPPED_EARLY
