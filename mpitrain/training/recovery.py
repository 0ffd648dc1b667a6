"""What a run resumes from: its newest checkpoint, its first weights, or one before a spike."""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain.actor.actor import Actor
from mpitrain.checkpoint import load
from mpitrain.cluster.status_board import BUSY
from mpitrain.comm.base.world import World
from mpitrain.errors import CheckpointError, MpitrainError
from mpitrain.inputs import shown
from mpitrain.plan.declared.formatting import finite
from mpitrain.training.checks.spikes import NONE_YET, Spikes
from mpitrain.training.run_opening import PreparedRun
from mpitrain.training.run_report import RunReport
from mpitrain.training.saving import state_io
from mpitrain.training.saving.newest import VERIFYING, newest_whole
from mpitrain.training.saving.saver import Saver
from mpitrain.weights.beginning import checkpoint_source, own_first_step, source_of
from mpitrain.weights.first_weights import fill


@dataclass
class RunCounts:
    """What a run has done so far. sequences: the place in the order of the data where the next step begins.

    skipped: updates left out, for gradients or spikes.
    """

    step: int = 0
    tokens: int = 0
    sequences: int = 0
    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class Recovery:
    """Reads checkpoints into a rank's actor, its counts and its spikes."""

    _opened: PreparedRun
    _world: World
    _actor: Actor
    _counts: RunCounts
    _spikes: Spikes
    _saver: Saver
    _report: RunReport
    _said_unknown: bool = False

    def __post_init__(self) -> None:
        self._plan = self._opened.plan
        self._config = self._plan.config
        self._rundir = self._opened.rundir
        self._place = self._actor.place

    def resume(self) -> None:
        """Resume from the checkpoint that was found, if any. Collective; raises CheckpointError."""
        step, folder = self._opened.newest.step, self._opened.newest.folder
        if step:
            self._go_back_to(step, folder)
            if self._opened.passed is not None:
                self._counts.sequences, self._spikes.state = self._opened.passed
        else:
            self._begin_with_weights()
        cut = self._cut_metrics(step if step else -1)
        self._report.say("\n".join([*self._opened.notes, *([cut] if cut else [])]))
        if step:
            steps = self._config.run.steps
            over = f": nothing is left to do, run.steps = {steps}" if step >= steps else ""
            self._report.say(f"resuming after step {step} of {folder}{over}")
            if over:
                self._saver.remove_rest()

    def _cut_metrics(self, step: int) -> str:
        cut = partial(self._rundir.truncate_metrics, step)
        return self._world.on_first_rank("cutting metrics.jsonl", cut)

    def _begin_with_weights(self) -> None:
        """Read first weights, if any, of the run's own step 0 or of model.init. Collective."""
        own = own_first_step(self._rundir.checkpoints)
        init = self._config.model.init
        if not own and not init:
            return
        where = self._rundir.checkpoints if own else init
        begin_s = time.monotonic()
        with self._place.at("resume", f"reading the weights of {where}", BUSY):
            self._world.on_every_rank(f"reading {where}", lambda: self._read_first(own))
        with self._place.at("resume", "spreading the weights"):
            self._actor.restored(0)
        seconds = time.monotonic() - begin_s
        what = f"{'step 0' if own else 'weights'} of {shown(where)}"
        total = sum(spec.numel for spec in self._plan.parameters() if spec.trained)
        self._opened.notes.append(f"beginning with {what}: {total:,} parameters in {seconds:.1f} s")

    def _read_first(self, own: bool) -> None:
        if own:
            source = checkpoint_source(load.open_step(self._rundir.checkpoints, 0), self._plan)
        else:
            source = source_of(self._config.model.init, self._plan)
        with closing(source):
            fill(self._actor.gradients.pieces, source, self._config.run.seed)

    def _kept_by(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint says of the metric of run.keep_best_by, beside validation's."""
        by = self._config.run.keep_best_by
        name, _, metric = by.rpartition("/")
        if type(line.get(by)) in (int, float):
            return {"kept_by": {by: finite(line[by])}}
        is_unknown = "val_loss" in line and metric not in line.get("evaluations", {}).get(name, ())
        if by != "val_loss" and is_unknown and not self._said_unknown:
            self._said_unknown = True
            self._report.say(
                f"warning: run.keep_best_by = {shown(by)}: step {self._counts.step} has no such metric "
                f"and can't be one of the best; it has {', '.join(map(shown, _metrics_of(line)))}"
            )
        return {}

    def last_saved(self) -> int:
        """Return the newest whole step that run.save_every asked for; 0: there is none yet.

        Collective over all ranks. What was saved on leaving doesn't count, as a run that never left
        hasn't got it; nor what is later than the last save or the spike, of before a run went back.
        """
        self._saver.finish()
        run = self._config.run
        folder = self._rundir.checkpoints
        newest = min(self._saver.newest, self._counts.step - 1)

        def due(step: int) -> bool:
            return bool(run.save_every) and step % run.save_every == 0 and step <= newest

        try:
            with self._saver.patiently(), self._place.at("resume", VERIFYING, BUSY):
                note = partial(self._place.enter, "resume", state=BUSY)
                newest_saved = newest_whole(
                    self._world, folder, run.verify, self._plan.stored_weights(), self._report.say, note, due
                )
        except CheckpointError as error:  # no bad input: what this run has saved
            spike = f"after the spike in step {self._counts.step}"
            fault = f"{spike} there is no checkpoint to roll back to: {error.args[0]}"
            raise MpitrainError(fault) from error
        self._saver.pass_over(newest_saved.damaged)
        self._report.say("" if newest_saved.step else "there is no checkpoint to roll back to yet")
        return newest_saved.step

    def roll_back(self, last: int) -> None:
        """Go back to a checkpoint after a spike; no batch is read again. Collective."""
        counts = self._counts
        spike, sequences = counts.step, counts.sequences
        before = self._spikes.state
        try:
            self._go_back_to(last, self._rundir.checkpoints)
        except CheckpointError as error:
            # no bad input: what this run has saved; the next start finds an earlier one
            raise MpitrainError(f"step {last}, to roll back to, can't be read: {error.args[0]}") from error
        self._spikes.rolled_back(spike, last, before)
        counts.sequences = sequences
        self._cut_metrics(last)
        done = f"rolled back to step {last}, rollback {self._spikes.rollbacks}"
        self._report.say(f"{done}; {spike - last} batches are not read again")

    def _go_back_to(self, step: int, folder: Path) -> None:
        """Read a checkpoint. Collective over all ranks; raises CheckpointError, alike on all ranks."""
        self._actor.settle()
        with self._place.at("resume", f"reading step {step}", BUSY):
            self._world.on_every_rank(f"reading step {step}", lambda: self._restore(step, folder))
        with self._place.at("resume", "spreading the weights"):
            self._actor.restored(self._counts.updates)

    def _restore(self, step: int, folder: Path) -> None:
        counts = self._counts
        with load.open_step(folder, step) as saved:
            state_io.read(saved, self._actor)
            meta = saved.meta
            counts.step, counts.tokens = meta["step"], meta["tokens"]
            counts.updates, counts.skipped = meta["updates"], meta["skipped"]
            counts.sequences = state_io.sequences_read(saved, self._plan.run_config)
            counts.skipped_in_a_row = meta.get("skipped_in_a_row", 0)
            self._spikes.state = meta.get("spikes") or NONE_YET

    def meta(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint says besides weights and moments. line: of metrics.jsonl."""
        counts = self._counts
        meta: dict[str, Any] = {
            "step": counts.step,
            "tokens": counts.tokens,
            "updates": counts.updates,
            "skipped": counts.skipped,
            "data": self._opened.corpora.digest,
            "order": self._opened.corpora.order,
        }
        meta |= {"routing": self._plan.routing.digest} if self._plan.routing else {}
        if evaluations := line.get("evaluations"):
            meta["evaluations"] = finite(evaluations)
        if self._config.run.keep_best:
            meta |= self._kept_by(line)
        return meta | {
            "sequences": counts.sequences,
            "loss_scale": self._actor.loss_scale.state,
            "spikes": self._spikes.state,
            "val_loss": finite(line.get("val_loss")),
            "skipped_in_a_row": counts.skipped_in_a_row,
        }


def _metrics_of(line: Mapping[str, Any]) -> list[str]:
    """Return the names by which run.keep_best_by can choose steps."""
    evaluations = line.get("evaluations", {})
    of_tasks = [f"{name}/{metric}" for name, of in evaluations.items() for metric in of]
    of_step = [key for key, value in line.items() if isinstance(value, float) and key != "time"]
    return [*of_step, *of_tasks]
