"""`mpitrain run`, after mpitrain/training/opening.py: build everything, then loop over steps, log, save, stop."""

import json
import math
from typing import Any

import torch

from mpitrain.actor.actor import Actor, StepResult
from mpitrain.actor.communicators import build_mesh
from mpitrain.actor.memory import measure
from mpitrain.actor.memory_meter import Watch
from mpitrain.actor.trace import Recorder, write_trace
from mpitrain.checkpoint import load, save
from mpitrain.cluster.board import BUSY, WAITING
from mpitrain.cluster.guard import Guard
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.order import Sampler
from mpitrain.errors import DONE, FAILED, STOPPED_EARLY
from mpitrain.layout.memory import compare, predict
from mpitrain.layout.routing import joined
from mpitrain.optim.rates import learning_rate
from mpitrain.parallel.device_clock import clock_of
from mpitrain.parallel.microbatch import Microbatch
from mpitrain.training import expert_loads, state_io
from mpitrain.training.console import Report
from mpitrain.training.determinism import TOLD
from mpitrain.training.device import Placement, shared, way_of_messages
from mpitrain.training.device import place as choose_place
from mpitrain.training.ledger import Ledger
from mpitrain.training.opening import Opened
from mpitrain.training.peak import DEFINITION, peak_of_all


def run(opened: Opened, world: World, guard: Guard) -> int:
    """Train what was opened, and return the exit code. Collective over `world`.

    Raises InputError, alike on all ranks, if a device or a checkpoint isn't what the configuration needs.
    """
    config, place = opened.plan.config, guard.place
    place.enter("build", "looking for the device")
    placement = choose_place(opened.plan, world)
    place.enter("build", "finding out whether MPI takes device buffers")
    way = way_of_messages(placement, world, config.comm.device, config.comm.timeout_s)
    with place.at("build", "making the communicators", WAITING):
        mesh = build_mesh(opened.plan, world.comm, place, way, placement.use)
    place.name(str(mesh), config.comm.timeout_s)
    with place.at("build", "building the model", BUSY):
        trainer = Trainer(opened, world, mesh, placement, guard)
    trainer.resume()
    code = trainer.train()
    with place.at("end", "freeing the communicators", WAITING):
        mesh.free()
    return code


class Trainer:
    """The loop of one rank. `step` is the number of steps done."""

    def __init__(self, opened: Opened, world: World, mesh: Mesh, placement: Placement, guard: Guard):
        self.config, self.rundir, self.corpora, self.mesh = opened.plan.config, opened.rundir, opened.corpora, mesh
        self.placement, self.device = placement, placement.device
        self.opened, self.world, self.guard, self.place = opened, world, guard, guard.place
        config = self.config
        self.clock = clock_of(self.device)
        mesh.keep_time(self.clock)
        self.recorder = Recorder(range(0), self.clock)
        self.plan = opened.plan
        self.actor = Actor(self.plan, mesh, self.device, self.recorder, self.place)
        self.num_microbatches = self.plan.num_microbatches
        self.step_tokens = config.batch.global_ * config.data.sequence  # read, whether their targets carry loss or not
        self.step = self.tokens = self.updates = self.skipped = 0
        self.skipped_in_a_row, self.last_words = 0, ""
        self.report = Report(mesh.rank, config.run.steps)
        self.peak = peak_of_all(placement, self.actor.site.dtype, world)
        self._flops = self.plan.flops_per_token() / self.peak.flops
        self.ledger = Ledger(mesh)
        self.watch = Watch(self.actor.stages.values(), self.actor.site.constants())
        self.to_record, self.recorded = range(0), list[list]()  # steps of which the routing is recorded, and what was
        self.watched = 0  # the step in which activations are counted

    # ------------------------------------------------------------ the loop

    def train(self) -> int:
        """Run the steps that are left; return the exit code."""
        self.watched = self.step + 1
        first = min(self.step + 2, self.config.run.steps)  # the first step is never typical
        self.recorder.steps = range(first, min(first + self.config.run.trace, self.config.run.steps + 1))
        last = min(self.step + self.config.run.routing, self.config.run.steps)
        self.to_record = range(self.step + 1, last + 1)
        self._announce()
        with self.report:
            code = self._steps()
        self.place.enter("end", "telling how it went")
        self.report.say(self.ledger.table(self.world))
        if self.config.experts.count and self.mesh.rank == 0:
            self.report.say(expert_loads.draw(self.rundir.metrics, self.rundir.loads))
        if code != DONE:
            self.report.say(self.last_words)
            return code
        self.report.say(compare(predict(self.plan, self.actor.shards_here)[self.actor.pp.rank], measure(self.actor, self.watch)))
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device)
            self.report.say(f"torch counted {most / 1e6:.2f} MB on the GPU of rank 0 at most, what it computed with meanwhile included")
        self._say_how_to_go_on()
        return DONE

    def _steps(self) -> int:
        """Run the steps that are left; return the exit code, the same on all ranks."""
        if self.step == 0:
            self._log({"step": 0, "val_loss": self._validate()})
        code = None
        while self.step < self.config.run.steps and code is None:
            code = self._one_step()
        return DONE if code is None else code

    def _one_step(self) -> int | None:
        """Run a step, validate, save and log as is due; return the exit code if it was the last one."""
        run, step = self.config.run, self.step + 1
        self.ledger.begin()
        begin, waited = self.clock.mark(), self.mesh.progress.waited_s
        lr = learning_rate(self.config, step)
        watch = self.watch if step == self.watched else None
        self.place.enter("step", "reading tokens")
        microbatches = self._microbatches(self.corpora.train, self.step)
        self.actor.recorded = [] if step in self.to_record else None
        result = self.actor.run_step(step, microbatches, lr, stop=self.guard.asked_to_stop, watch=watch)
        self.place.enter("step", "between two steps")
        step_s = self.clock.seconds(begin, self.clock.mark())
        waited_share = (self.mesh.progress.waited_s - waited) / step_s
        self.step, self.tokens = step, self.tokens + self.step_tokens
        self.updates, self.skipped = self.updates + (not result.skipped), self.skipped + result.skipped
        line = self._line(result, lr, step_s) | {"comm": self.ledger.end()}
        if step == run.steps or (run.eval_every and step % run.eval_every == 0):
            line["val_loss"] = self._validate()
            if self.config.experts.count:
                mine = expert_loads.shares(self.actor)
                line[expert_loads.KEY] = expert_loads.together(self.world.all_gather("the loads of experts", mine))
        self._log(line, waited_share)
        if step in self.to_record:
            self._record_routing(step)
        if run.trace and step == self.recorder.steps[-1]:
            self._write_trace()
        over, sick = step == run.steps or result.stop, self._count_skips(result)
        if not sick and (over or (run.save_every and step % run.save_every == 0)):
            unsaved = self._save(result)
            sick = unsaved if over else ""
        if sick:
            advice = "lower optimizer.lr, or look at the data, and start again"
            self.last_words = f"diverged: {sick}; the last good checkpoint is kept: {advice}"
            return FAILED
        if result.stop and step < run.steps:
            self.last_words = f"stopped after step {step} with a checkpoint; start the same command again to go on"
            return STOPPED_EARLY
        return None

    def _count_skips(self, result: StepResult) -> str:
        """Count the steps that were skipped in a row, and say so; return why the run has to end, if it has to. Alike on all ranks."""
        most = self.config.run.max_skips
        if not result.skipped:
            self.skipped_in_a_row = 0
        elif result.num_tokens:  # without a target there is nothing to learn, and nothing is wrong
            self.skipped_in_a_row += 1
            limit = f" of at most {most} (run.max_skips)" if most else ""
            self.report.say(f"step {self.step} was skipped: its gradients are not finite; {self.skipped_in_a_row} in a row{limit}")
        if most and self.skipped_in_a_row >= most:
            return f"{self.skipped_in_a_row} steps were skipped in a row (run.max_skips = {most})"
        return ""

    def _microbatches(self, sampler: Sampler, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of a step (counted from 0); stages in the middle look only for documents."""
        batch, actor, ends = self.config.batch, self.actor, self.corpora.separator
        if not (actor.first or actor.last or ends is not None):
            return [Microbatch() for _ in range(self.num_microbatches * actor.table.segments)]
        local = batch.global_ // self.config.parallel.dp
        begin = step * batch.global_ + self.mesh["dp"].rank * local
        tokens = torch.from_numpy(sampler.sequences(range(begin, begin + local))).to(self.device)
        return actor.cut(tokens, ends)

    def _validate(self) -> float:
        batches = (self._microbatches(self.corpora.validation, i) for i in range(self.config.run.eval_batches))
        with self.place.at("validation", "reading tokens"):
            totals = [self.actor.evaluate(self.step, microbatches) for microbatches in batches]
        return sum(loss for loss, _ in totals) / (sum(count for _, count in totals) or math.nan)

    # ------------------------------------------------------------ what the user and other programs see

    def _line(self, result: StepResult, lr: float, step_s: float) -> dict:
        tokens_per_s = self.step_tokens / step_s
        return {
            "step": self.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": self.tokens,
            "tokens_per_s": tokens_per_s,
            "step_s": step_s,
            "mfu": tokens_per_s * self._flops,
            "skipped": self.skipped,
            **({"loss_scale": self.actor.loss_scale.value} if self.actor.loss_scale.dynamic else {}),
            "peak_in_flight": result.peak_in_flight,
            **result.told,
        }

    def _log(self, line: dict, waited_share: float = 0.0) -> None:
        """Append a line to metrics.jsonl, on disk before the next step, and show it."""
        if self.mesh.rank:
            return
        self.place.enter("step", f"writing {self.rundir.metrics}")
        with self.rundir.metrics.open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps(finite(line), allow_nan=False) + "\n")
        self.place.enter("step", "telling of the step")
        if self.step:
            self.report.step(line, waited_share)
        else:
            self.report.say(f"val loss before training {line['val_loss']:.4f}")

    def _announce(self) -> None:
        config, model = self.config, self.config.model
        count = sum(spec.numel for spec in self.plan.parameters())
        self.report.say(
            f"ranks: {self.mesh.size}, nodes: {self.world.num_nodes}, {self.mesh.grid}; {config.pipeline.schedule}, microbatches a rank: "
            f"{self.num_microbatches}; {self.device.type}, threads a rank: {torch.get_num_threads()}"
        )
        self.report.say(
            f"{count / 1e6:.2f} M parameters ({model.layers} blocks of width {model.width}), {config.batch.global_} sequences of "
            f"{config.data.sequence} tokens a step, training on {self.corpora.train.num_sequences:,} sequences of {config.data.source}"
        )
        if not self.mesh["tp"].one_node:
            self.report.say(f"parallel.tp = {config.parallel.tp} spans nodes: every layer waits for the network; use a smaller tp")
        self.report.say(f"MFU: {DEFINITION}, {self.peak.source}")
        self._announce_devices()

    def _announce_devices(self) -> None:
        """Say which GPU, who shares one, and how messages get there. Collective over all ranks."""
        gpu, wish = self.placement.gpu, self.config.comm.device
        if gpu is None:
            self.report.say("" if wish == "auto" else f'comm.device = "{wish}" has no effect: this run computes on CPUs')
            return
        self.report.say(f"GPU of rank 0: {gpu}; {self.mesh.way}")
        self.report.say(TOLD[self.config.numerics.deterministic])
        said = shared(self.placement, self.world)
        self.report.say(f"{said}: they take turns, and have its memory and its peak together" if said else "")

    def _record_routing(self, step: int) -> None:
        """Gather where the tokens of a step went; write the trace when it is complete. Collective over all ranks."""
        every = self.world.all_gather("the routing of a step", self.actor.recorded)
        self.recorded.append([each for part in every for each in part])
        if step == self.to_record[-1] and self.mesh.rank == 0:
            joined(self.config, self.recorded).write(self.rundir.routing)
            self.report.say(f"recorded the routing of {len(self.recorded)} steps: --set experts.replay={self.rundir.routing}")

    def _write_trace(self) -> None:
        with self.place.waiting("for all ranks: their part of the trace"):
            write_trace(self.rundir.trace, self.recorder, self.mesh, self.world, self.actor.table)
        self.report.say(f"traced {len(self.recorder.steps)} steps: mpitrain schedule compare --trace {self.rundir.trace}")

    def _say_how_to_go_on(self) -> None:
        path = self.rundir.path
        self.report.say(
            f"done: {self.step} steps, everything is in {path}\n"
            f"  sample text     mpitrain generate {path} --prompt 'def '\n"
            f"  train further   mpirun -n {self.mesh.size} mpitrain run {path}/config.toml --set run.steps={2 * self.step}\n"
            f"  your own run    copy {path}/config.toml, change it (data.source = \"text\", data.path = ...) and give it another run.dir"
        )

    # ------------------------------------------------------------ checkpoints

    def _save(self, result: StepResult) -> str:
        """Write a checkpoint, committed by rank 0: a shard from each rank that is the first to have its part of a domain's state.

        Collective over all ranks. What isn't finite is not saved: return then why, and say it.
        """
        world, place, folder = self.world, self.place, self.rundir.checkpoints
        sick = self._sick(result)
        if sick:
            self.report.say(f"step {self.step} is not saved: {sick}")
            return sick
        with place.at("save", f"making the folder of step {self.step}", BUSY):
            temporary = world.from_first_rank("making the folder", lambda: save.begin(folder, self.step))
        mine = (self.mesh["model"].rank, self.mesh["data"].rank) if state_io.has_a_shard(self.actor) else None
        writers = sorted(each for each in world.all_gather("who writes a shard", mine) if each)
        with place.at("save", f"writing a shard of step {self.step}", BUSY):
            if mine:
                state_io.write(temporary, writers.index(mine), self.actor)
            world.barrier("writing their shards")
        meta = {"step": self.step, "tokens": self.tokens, "updates": self.updates, "skipped": self.skipped, "data": self.corpora.digest}
        meta |= {"loss_scale": self.actor.loss_scale.state}
        with place.at("save", f"committing step {self.step}", BUSY):
            world.from_first_rank("committing", lambda: save.commit(temporary, meta, len(writers)))
        return ""

    def _sick(self, result: StepResult) -> str:
        """Return what isn't finite, on any rank: gradients, or weights of which the next loss would tell. Collective over all ranks."""
        scale = self.actor.loss_scale
        if result.num_tokens and (not math.isfinite(result.loss) or (result.skipped and not (scale.dynamic and scale.value > 1))):
            return "its loss or its gradients are not finite"
        with self.place.at("save", "looking for weights that are not finite", BUSY):
            every = self.world.all_gather("are their weights finite", state_io.not_finite(self.actor))
            found = next((name for name in every if name), None)
        return f"{found} is not finite" if found else ""

    def resume(self) -> None:
        """Go on from the checkpoint that was found, if there is one. Collective over all ranks.

        Raises CheckpointError, alike on all ranks, if it can't be read any more.
        """
        step, folder = self.opened.newest.step, self.rundir.checkpoints
        if step:
            with self.place.at("resume", f"reading step {step}", BUSY):
                self.world.on_every_rank(f"reading step {step}", lambda: self._restore(step))
            with self.place.at("resume", "spreading the weights"):
                self.actor.restored(self.updates)
        cut = self.world.on_first_rank("cutting metrics.jsonl", lambda: self.rundir.truncate_metrics(step if step else -1))
        self.report.say("\n".join([*self.opened.notes, *([cut] if cut else [])]))
        if step:
            self.report.say(f"going on after step {step} of {folder}")

    def _restore(self, step: int) -> None:
        folder = self.rundir.checkpoints
        with load.open_step(folder, step) as saved:
            state_io.read(saved, self.actor)
            self.step, self.tokens = saved.meta["step"], saved.meta["tokens"]
            self.updates, self.skipped = saved.meta["updates"], saved.meta["skipped"]


def finite(value: Any) -> Any:
    """Return what JSON can hold: numbers that aren't finite are None."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
