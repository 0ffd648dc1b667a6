"""Saving while training continues: threads write, and all ranks know at one step that it is saved.

    after step 40   a snapshot in host memory; a thread of each rank that has a shard writes, hashes
                    and syncs it
    during step 42  rank 1, the last one, is done
    after step 43   all ranks know: each said, as the step began, how far it was; a thread of rank 0
                    commits, and removes what isn't kept
    after step 44   all ranks know that step 40 is saved, and the line of step 44 says so

How far a rank is travels with the totals of the step (actor/step_totals.py). Ranks wait in finish()
only: for the end, to leave, or to save again.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpitrain.actor.actor import Actor
from mpitrain.checkpoint import save
from mpitrain.checkpoint.files import saving
from mpitrain.checkpoint.folders import TMP, name_of, remove_leftovers
from mpitrain.checkpoint.hdf5_bytes import STEP
from mpitrain.checkpoint.load import open_step
from mpitrain.checkpoint.meta import StepInfo
from mpitrain.checkpoint.retention import Policy, Retention
from mpitrain.cluster import code_identity
from mpitrain.cluster.entry import warn
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.lock import user
from mpitrain.cluster.processes import no_more
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import BUSY, WORKING, RankStatus
from mpitrain.comm.base import library
from mpitrain.comm.base.group import group_of
from mpitrain.comm.base.world import World
from mpitrain.config import to_toml
from mpitrain.errors import CheckpointError
from mpitrain.inputs import remove
from mpitrain.training.saving import state_io
from mpitrain.training.saving.gathered import Gathered
from mpitrain.training.saving.newest import Newest
from mpitrain.training.saving.state_io import Snapshot

OVER, FAILED, UNDER_WAY = range(3)  # what a rank tells; of all ranks the highest counts
LOOK_S = 0.25
SLOW_S = 1.0  # for which a step may wait for an earlier save without a word


class Unhealthy(CheckpointError):
    """A step with weights that aren't worth saving."""


class Task:
    """Something that a thread of this rank does, or the rank itself if it can have no thread.

    over: is set at the end.
    what: it does now.
    failed: why it could not be done, if the system or the weights (`unhealthy`) are why.
    """

    def __init__(self, place: RankStatus, what: str, action: Callable[[Callable[[str], None]], Any]):
        self.over = threading.Event()
        self.what = what
        self.failed = ""
        self.unhealthy = False
        self.result = None
        self._place = place
        self._action = action
        self._error = None
        try:
            threading.Thread(target=self._run, name="mpitrain-save", daemon=True).start()
        except RuntimeError:
            how = f"no thread can be started, {what} in the foreground: steps wait"
            warn(f"mpitrain: {place.who}: {how}; {no_more()}")
            with place.at("save", what, BUSY):
                self._run()

    @property
    def number(self) -> int:
        """How far it is, as ranks tell. Raises what nobody expected to be raised there."""
        if not self.over.is_set():
            return UNDER_WAY
        if self._error is not None:
            self._place.enter("save", self.what)
            raise self._error
        return FAILED if self.failed else OVER

    def _run(self) -> None:
        try:
            self._note(self.what)
            self.result = self._action(self._note)
        except CheckpointError as error:
            self.failed = error.args[0]
            self.unhealthy = isinstance(error, Unhealthy)
        except BaseException as error:
            # to be raised where it ends the job: a thread that ends is missed by nobody
            self._error = error
        finally:
            self._place.meanwhile = ""
            self.over.set()

    def _note(self, what: str) -> None:
        self.what = self._place.meanwhile = what


@dataclass(frozen=True)
class Outcome:
    """How the save of a step went. reason: why it isn't saved, else "".  unhealthy: it isn't worth it.

    removed: earlier steps that are not kept.
    kept: why some of them could not be removed.
    stall_s: training stood still for the snapshot.
    took_s: from there to the commit.
    waited_s: training had to wait for it later.
    """

    step: int
    reason: str = ""
    unhealthy: bool = False
    removed: tuple[int, ...] = ()
    kept: str = ""
    stall_s: float = 0.0
    took_s: float = 0.0
    waited_s: float = 0.0

    def line(self) -> dict:
        """Return it for metrics.jsonl."""
        line = {
            "step": self.step,  # the step that was saved
            "took_s": self.took_s,  # seconds from the copy to the commit
            "stall_s": self.stall_s,  # seconds for which training stood still for the copy
            "waited_s": self.waited_s,  # seconds that a later step had to wait for the save
        }
        if self.removed:
            line["removed"] = self.removed  # steps that were removed (run.keep)
        if self.reason:
            line["not_saved"] = self.reason  # why the step could not be saved
        return line


@dataclass
class _Save:
    step: int
    meta: dict
    tmp: Path
    begun: float
    stall_s: float
    committing: bool = False
    waited_s: float = 0.0


def about_steps(actor: Actor, world: World) -> StepInfo:
    """Return what a checkpoint says of the run that writes it."""
    writer = {
        "layout": str(actor.mesh.grid),
        "ranks": world.size,
        "nodes": world.num_nodes,
        "MPI": library.name(),
        **code_identity.code(),
    }
    return StepInfo(to_toml(actor.plan.run_config), writer)


class Saver:
    """Saves steps of an actor. Every call, and construction, is collective over all ranks.

    A shard comes from each rank that is the first to have its part of a domain's state, or from the
    first of a group of ranks (run.shards).
    resumed: the checkpoint that the run resumes from.
    say: prints a line on the first rank.
    last: how the last save went.
    newest: the step that can be gone back to, 0 if there is none.
    most_bytes: that one rank writes.
    """

    def __init__(
        self, actor: Actor, world: World, rundir: RunDir, resumed: Newest, say: Callable[[str], None]
    ):
        config = actor.plan.config
        run = config.run
        self._world = world
        self._place = actor.place
        self._rundir = rundir
        self._say = say
        self._background = run.save == "background"
        # as at first: steps say nothing of disks
        self._patience_s = Limit(config.comm.timeout_s).seconds
        self._snapshot: Snapshot | Gathered
        if run.shards == "rank":
            mine = actor.mesh["model"].rank, actor.mesh["data"].rank
            me = mine if state_io.has_a_shard(actor) else None
            self._snapshot = Snapshot(actor, copied=self._background)
        else:
            self._snapshot = Gathered(Snapshot(actor, copied=False), group_of(world, run.shards))
            me = (world.rank,) if self._snapshot.num_bytes else None
        back = run.save_every if config.spikes.do == "rollback" else 0
        policy = Policy(run.keep, run.keep_every, run.keep_best, back, run.keep_best_by)
        self._folder = rundir.checkpoints
        self._retention = Retention(self._folder, policy, {*resumed.damaged})
        self._about = about_steps(actor, world)
        self._over = list[Outcome]()
        self._save: _Save | None = None
        self._task: Task | None = None
        self.last = Outcome(resumed.step)
        self.newest = self._place.saved = resumed.step
        shards_of_ranks = world.all_gather("who writes a shard", (me, self._snapshot.num_bytes))
        writers = sorted(writer for writer, _ in shards_of_ranks if writer)
        self._number = writers.index(me) if me else None
        self._num_shards = len(writers)
        sizes = [num_bytes for _, num_bytes in shards_of_ranks]
        self._num_bytes = sum(sizes)
        self.most_bytes = max(sizes)
        # the next one writes over what a killed one has left
        digest = code_identity.digest(str(self._folder.absolute()))
        self._staging = (
            Path(run.staging) / f"mpitrain-{digest}-{self._number}.h5" if run.staging and me else None
        )

    @property
    def number(self) -> int:
        """How far this rank is, for all to hear. Not collective."""
        return OVER if self._task is None else self._task.number

    @property
    def copied_bytes(self) -> int:
        """What is copied of this rank to save it beside the steps."""
        return self._snapshot.own_bytes if self._background else 0

    @property
    def gathered(self) -> str:
        """Say what this rank holds to save it for others, if there are any."""
        return self._snapshot.description if isinstance(self._snapshot, Gathered) else ""

    def start(self, step: int, meta: dict) -> None:
        """Finish what is under way, and begin to write a snapshot; without copies, wait for it."""
        self.finish()
        last = self.last
        if last.waited_s > SLOW_S and self._background:
            waited = f"step {step} waited {last.waited_s:.1f} s until step {last.step} was saved"
            self._say(f"{waited}, which took {last.took_s:.1f} s")
        with self._place.at("save", f"making the folder of step {step}", BUSY):
            reason = self._world.from_first_rank("making the folder", lambda: self._begin(step))
        if reason:
            return self._record(Outcome(step, reason))
        begun = time.monotonic()
        with self.patiently(), self._place.at("save", f"copying step {step} to host memory", BUSY):
            self._snapshot.take()
        self._save = _Save(step, meta, self._folder / (name_of(step) + TMP), begun, time.monotonic() - begun)
        if self._number is not None:
            with self.patiently():
                self._task = Task(self._place, f"writing a shard of step {step}", self._write)
        if not self._background:
            self.finish()

    def remove_rest(self) -> None:
        """Remove what a run that was killed in its last save had still to remove: no other save will."""
        what = "removing checkpoints that are not kept"
        with self.patiently(), self._place.at("save", what, BUSY):
            reason = self._world.from_first_rank(what, self._remove_rest)
        self._say(f"could not remove old checkpoints: {reason}" if reason else "")

    def pass_over(self, damaged: Iterable[int]) -> None:
        """Take note of steps that were found damaged: they take no place of those that are kept."""
        self._retention.damaged.update(damaged)

    def refuse(self, step: int, reason: str) -> None:
        """Wait for what is under way, and take note that a step isn't worth saving."""
        self.finish()
        self._record(Outcome(step, reason, unhealthy=True))

    def lines(self) -> dict:
        """Return how saves went that are over since the last call, for a line of metrics.jsonl."""
        over, self._over = self._over, []
        # saves that ended since the last line
        return {"saves": [outcome.line() for outcome in over]} if over else {}

    def advance(self, number: int) -> None:
        """Continue what is under way. number: the highest that a rank reported."""
        if self._save is None or number == UNDER_WAY:
            return
        if number == FAILED:
            self._give_up()
        elif self._save.committing:
            removed, kept = self._task.result if self._task else ((), "")
            self._end(removed=tuple(removed), kept=kept)
        else:
            self._save.committing = True
            self._task = None
            if self._world.rank == 0:
                with self.patiently():
                    self._task = Task(self._place, f"committing step {self._save.step}", self._commit)

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Let this rank stay longer where it is: a slow disk may take minutes. Collective."""
        limit_s = self._place.limit_s
        self._place.name(self._place.who, max(limit_s, self._patience_s))
        yield
        self._place.name(self._place.who, limit_s)

    def finish(self) -> None:
        """Wait until nothing is under way."""
        begin = time.monotonic()
        waited_for = self._save
        if waited_for is None:
            return
        with self.patiently():
            while self._save is not None:
                until = f"until step {self._save.step} is saved"
                with self._place.at("save", f"waiting {until}", WORKING):
                    self._wait_here()
                numbers = self._world.all_gather(until, self.number)
                waited_for.waited_s = time.monotonic() - begin
                self.advance(max(numbers))

    # ------------------------------------------------------------ what threads do

    def _write(self, note: Callable[[str], None]) -> None:
        parts = self._snapshot.parts()
        note("looking for weights that are not finite")
        if (name := state_io.not_finite(parts)) is not None:
            raise Unhealthy(f"{name} is not finite")
        with saving(self._folder):
            save.write_shard(self._save.tmp, self._number, parts, note, self._staging)

    def _commit(self, note: Callable[[str], None]) -> tuple[list[int], str]:
        note("syncing metrics.jsonl")
        self._rundir.sync_metrics()
        with saving(self._folder):
            now = time.strftime("%Y-%m-%d %H:%M:%S %z")
            here = {"host": socket.gethostname(), "user": user(), "time": now}
            about = replace(self._about, writer={**self._about.writer, "shards": self._num_shards, **here})
            save.commit(self._save.tmp, self._save.meta, self._num_shards, note, about)
        self._place.saved = self._save.step
        note("removing checkpoints that are not kept")
        try:
            return self._retention.prune(self._save.step, self._retention.loss(self._save.meta)), ""
        except CheckpointError as error:  # the step is saved all the same
            return [], error.args[0]

    # ------------------------------------------------------------ progress of a save

    def _begin(self, step: int) -> str:
        try:
            save.begin(self._folder, step, self._num_bytes)
        except CheckpointError as error:
            return error.args[0]
        return ""

    def _remove_rest(self) -> str:
        try:
            with saving(self._folder):
                remove_leftovers(self._folder)
            with open_step(self._folder, self.newest) as saved:
                self._retention.prune(self.newest, self._retention.loss(saved.meta))
        except CheckpointError as error:  # the run is over all the same
            return error.args[0]
        return ""

    def _wait_here(self) -> None:
        """Wait for the thread of this rank; each thing it does has the limit of a place."""
        task, seen = self._task, ""
        while task is not None and not task.over.wait(LOOK_S):
            if task.what != seen:
                seen = task.what
                self._place.enter(self._place.phase, self._place.what, self._place.state)

    def _give_up(self) -> None:
        """Forget a save that failed on a rank; the steps before it are as they were."""
        mine = (self._task.failed, self._task.unhealthy) if self._task else ("", False)
        reasons = self._world.all_gather("why a step isn't saved", mine)
        rank, (reason, unhealthy) = next(item for item in enumerate(reasons) if item[1][0])
        if self._world.rank == 0:
            with suppress(OSError):  # then the next save does
                remove(self._save.tmp, STEP)
        if not unhealthy and self._world.size > 1:
            reason = f"rank {rank}: {reason}"
        self._end(reason=reason, unhealthy=unhealthy)

    def _end(self, **outcome: Any) -> None:
        over = self._save
        self._save = self._task = None
        times = {"stall_s": over.stall_s, "took_s": time.monotonic() - over.begun, "waited_s": over.waited_s}
        self._record(Outcome(over.step, **outcome, **times))

    def _record(self, outcome: Outcome) -> None:
        self._over.append(outcome)
        self.last = outcome
        self.newest = self._place.saved = self.newest if outcome.reason else outcome.step
        if outcome.reason:
            newest = "there is no checkpoint yet"
            if self.newest:
                newest = f"the newest checkpoint is of step {self.newest}"
            self._say(f"step {outcome.step} is not saved: {outcome.reason}; {newest}")
        elif outcome.kept:
            self._say(f"step {outcome.step} is saved, but earlier ones were not removed: {outcome.kept}")
