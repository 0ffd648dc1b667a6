"""What `mpitrain run` settles before torch is loaded: configuration, run directory, newest checkpoint and tokens.

So what a user got wrong is refused in a second; to load torch, all ranks of a node at once, takes several. Everything is checked before
anything of the run is written, and whatever is wrong on one rank alone is raised on all.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mpitrain.cluster import logs, preflight
from mpitrain.cluster.allocation import End, end_of_allocation, end_of_user, seconds_of
from mpitrain.cluster.board import BUSY
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.threads import num_threads
from mpitrain.comm.world import World, connect
from mpitrain.config import Config
from mpitrain.data.corpus import check_source
from mpitrain.data.order import Sampler
from mpitrain.data.split import split
from mpitrain.data.tokenizer import Tokenizer, load_tokenizer, separator
from mpitrain.data.tokens import Description, describe, open_tokens, prepare
from mpitrain.errors import CheckpointError, ConfigError, DataError, InputError
from mpitrain.inputs import shown
from mpitrain.layout.node_memory import require_memory
from mpitrain.layout.plan import Plan
from mpitrain.layout.resolve import resolve
from mpitrain.model.families.catalog import plan_of
from mpitrain.training.agreement import attempt, require_same_configuration
from mpitrain.training.replay.wish import Wish
from mpitrain.training.saving.newest import VERIFYING, Newest, newest_whole

SEEN_S = 60.0  # for which a network file system may still say that there is no such file


@dataclass(frozen=True)
class Corpora:
    """The tokens of a run, in an order that is a pure function of seed and slot. separator: what ends a document, if it matters."""

    train: Sampler
    validation: Sampler
    digest: str
    separator: int | None


@dataclass(frozen=True)
class Opened:
    """A plan that holds, with its run directory, its newest checkpoint and its tokens.

    notes: for the user.  end: of the time this job has, on the first rank, if somebody says.
    """

    plan: Plan
    rundir: RunDir
    corpora: Corpora
    newest: Newest
    notes: list[str]
    end: End | None


def open_run(path: str | None, overrides: tuple[str, ...], guard: Guard, record: Wish | None = None) -> tuple[Opened, World]:
    """Start MPI, check everything that needs no device, take the run directory, and prepare the tokens on rank 0.

    Collective over all ranks. Raises InputError, alike on all ranks and before anything of a run is changed, for whatever the user has
    to change.
    """
    guard.place.enter("start", "reading the configuration", BUSY)
    read = attempt(path, overrides)  # before MPI starts: its limit (comm.timeout_s) is for that, too
    if isinstance(read, Config):
        guard.place.name(guard.place.who, Limit(read.comm.timeout_s).seconds)
    world = connect(guard.place)
    guard.join(world)
    guard.place.enter("start", "checking the configuration", BUSY)
    plan, tokenizer, same = world.on_every_rank("checking the configuration", lambda: _plan(read, world, record))
    require_same_configuration(world, plan.config)
    world.require_same(same)
    _require_device(plan, world)
    return _Opening(plan, tokenizer, world, guard, record, _told_of_moved(path, overrides, plan.config.run.dir)).open(), world


def _told_of_moved(path: str | None, overrides: tuple[str, ...], run_dir: str) -> list[str]:
    """Say so if the configuration is that of a run directory, which was moved or copied, and names another one."""
    here = RunDir(os.path.dirname(path or ""))
    asked = any(override.partition("=")[0].strip() == "run.dir" for override in overrides)
    own = os.path.basename(path or "") == here.config.name and os.path.exists(here.metrics)
    if asked or not own or os.path.realpath(here.path) == os.path.realpath(run_dir):
        return []
    found = f"{shown(path)} is that of a run directory, and leads to another: run.dir = {shown(run_dir)}"
    return [f"{found}; --set run.dir={shown(here.path)} goes on with the run beside it"]


def _plan(read: Config | InputError, world: World, record: Wish | None) -> tuple[Plan, Tokenizer, dict[str, str]]:
    """Resolve the configuration and prove its schedule; return also what all ranks need alike. Writes and sends nothing."""
    if isinstance(read, InputError):
        raise read
    num_threads(read.run)
    if read.run.time_limit:
        seconds_of(read.run.time_limit)
    end_of_user()
    _require_staging(read.run.staging)
    tokenizer = load_tokenizer(read.data.tokenizer)
    separator(read.data, tokenizer)
    plan = plan_of(resolve(read, world.size, tokenizer.vocab, world.num_nodes, world.node_ranks))
    require_memory(plan)
    if record:
        record.require(world.size, plan.config.run.steps)
    table = plan.training.table
    same = {
        "the tokenizer": tokenizer.identity,
        "the table of pipeline.schedule": preflight.digest(repr(table)),
        **({"--record": f"{record.rank}:{record.step}"} if record else {}),
        **preflight.code(),
        **({"the routing of experts.replay": plan.routing.digest} if plan.routing else {}),
    }
    return plan, tokenizer, same


def _require_staging(path: str) -> None:
    """Raise ConfigError unless shards can be written to this directory of the node first."""
    if path and not os.path.isdir(path):
        raise ConfigError(f"run.staging = {path}: no such directory on {socket.gethostname()}; make it on every node, or leave it out")
    if path and not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"run.staging = {path}: not writable on {socket.gethostname()}; choose another directory, or leave it out")


def _require_device(plan: Plan, world: World) -> None:
    """Refuse a device that can't do or hold what is asked, and compilers, before the run directory is made; for this torch is needed.

    Collective over all ranks.
    """
    config = plan.config
    direct = config.comm.device == "direct"
    needs = direct or config.precision.compute == "fp8"
    if config.run.compile or config.run.device == "cuda" or (config.run.device == "auto" and needs):
        from mpitrain.training.machine.device import place, way_of_messages

        placement = place(plan, world)
        if direct:  # a child process may have to try it now and again later: a refused run leaves no directory
            way_of_messages(placement, world, "direct", Limit(config.comm.timeout_s).seconds)


class _Opening:
    """The run directory and what is in it, step by step; each is collective, and an error in one undoes what was made."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, world: World, guard: Guard, record: Wish | None, notes: list[str]):
        self.plan, self.config, self.tokenizer, self.world, self.guard, self.record = plan, plan.config, tokenizer, world, guard, record
        self.rundir, self.notes = RunDir(self.config.run.dir), notes

    def open(self) -> Opened:
        world, place = self.world, self.guard.place
        try:
            with place.at("start", "taking the run directory", BUSY):
                token = world.on_first_rank("taking the run directory", self._take)
                patience_s = SEEN_S if world.num_nodes > 1 else 0.0
                world.on_every_rank("looking for the run directory", lambda: self.rundir.require_seen(token, patience_s))
            with place.at("resume", VERIFYING, BUSY):
                needs, share = self.plan.stored_weights(), self.config.run.verify
                folder, note, each = self.rundir.checkpoints, self.notes.append, lambda what: place.enter("resume", what, BUSY)
                newest = newest_whole(world, folder, share, needs, note, each)
                if self.record:
                    world.on_first_rank("looking at --record", lambda: self.record.require_open(newest.step, self.rundir.path))
            self.notes += self._told_of_replay(newest)
            with place.at("tokens", "preparing the tokens", BUSY):
                world.on_first_rank("preparing the tokens", lambda: self._prepare(newest))
                corpora = world.on_every_rank("opening the tokens", self._corpora)
                world.require_same({"the tokens": corpora.digest})
            if self.config.run.logs:
                with place.at("start", "opening the logs", BUSY):
                    world.on_every_rank("opening the logs", lambda: logs.begin(self.rundir.logs, world.rank, world.size))
            world.on_first_rank("writing config.toml", lambda: self.rundir.begin(self.config))
        except InputError:
            if world.rank == 0:
                self.rundir.undo()
            raise
        with place.at("start", "asking the scheduler for the end of this job", BUSY):
            limit, note = self.config.run.time_limit, self.notes.append
            end = world.from_first_rank("asking the scheduler", lambda: end_of_allocation(limit, note=note))
        return Opened(self.plan, self.rundir, corpora, newest, self.notes, end if world.rank == 0 else None)

    def _take(self) -> str:
        token, said = self.rundir.take(self.guard.end, self._still)
        self.notes += [said] * bool(said)
        self.rundir.require_same_run(self.config)
        check_source(self.config.data.source, self.config.data.path)
        return token

    def _told_of_replay(self, newest: Newest) -> list[str]:
        routing, steps = self.plan.routing, range(newest.step + 1, self.config.run.steps + 1)
        return [said] if routing and (said := routing.lacks(steps)) else []

    def _require_same_routing(self, newest: Newest) -> None:
        routing = self.plan.routing
        if routing and newest.routing not in ("", routing.digest):
            what = f"{self.rundir.checkpoints}: trained with another content of experts.replay = {shown(self.config.experts.replay)}"
            raise CheckpointError(f"{what} than it has now; put back what it had, or choose another run.dir")

    def _prepare(self, newest: Newest) -> None:
        self._require_same_routing(newest)

        def accept(description: Description, tokens: np.ndarray) -> None:
            if newest.step and description.digest != newest.data:
                now = f"{self.config.data.source} gives now{self._with_another_tokenizer()}"
                raise CheckpointError(f"{self.rundir.checkpoints}: trained on other data than {now}; choose another run.dir")
            self._samplers(tokens)

        data = self.config.data
        prepare(data.source, data.path, self.tokenizer, self.rundir.data, accept, self._still)

    def _with_another_tokenizer(self) -> str:
        """Say so if the tokens that are there were made with another one."""
        with suppress(DataError):
            if describe(self.rundir.data).origin.tokenizer != self.tokenizer.identity:
                return f', with another tokenizer (data.tokenizer = "{shown(self.config.data.tokenizer)}")'
        return ""

    def _corpora(self) -> Corpora:
        samplers = self._samplers(open_tokens(self.rundir.data))
        return Corpora(*samplers, describe(self.rundir.data).digest, separator(self.config.data, self.tokenizer))

    def _samplers(self, tokens: np.ndarray) -> tuple[Sampler, Sampler]:
        sequence = self.config.data.sequence
        train, validation = split(tokens, self.config.data.val_fraction, sequence)
        return Sampler(train, sequence, self.config.run.seed), Sampler(validation, sequence)

    def _still(self, what: str) -> None:
        """Tell the watchdog and the other ranks that this one still works."""
        self.guard.place.enter(self.guard.place.phase, what, BUSY)
        self.world.beat()
