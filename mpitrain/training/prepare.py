"""What `mpitrain run` checks before torch is loaded: configuration, model, tokenizer, layout, plan.

So what a user got wrong is refused in a second, before anything of the run is written, and on all
ranks. run_opening.py then takes the run directory.
"""

import os
import socket
import uuid
from contextlib import suppress
from typing import NamedTuple

from mpitrain.cluster import code_identity
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.launch import rank_of_launcher
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.rundir import RunDir, read_with_origins
from mpitrain.cluster.status_board import BUSY
from mpitrain.cluster.threads import num_threads
from mpitrain.comm.base.spare_ranks import is_enabled, require_fault_tolerance, survives_deaths
from mpitrain.comm.base.world import World
from mpitrain.config import Config, LoadedConfig, RecoveryTable, as_override, plugins_of
from mpitrain.data.tokenizer import Tokenizer, Vocabulary, load_tokenizer, separator, tokenizer_of
from mpitrain.errors import ConfigError, DataError, InputError
from mpitrain.inputs import is_there, kind_of, shown
from mpitrain.model.families.catalog import plan_for
from mpitrain.origins import PLANNER, KeyOrigin
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.plan.predict.speed_costs import zero_line
from mpitrain.plan.predict.step_time.machine import find_machine
from mpitrain.plan.settings.key_origins import with_resolved
from mpitrain.plan.settings.profile_request import ProfileRequest
from mpitrain.plan.settings.rule_table import idle_settings
from mpitrain.report.loggers.catalog import require_loggers
from mpitrain.training.agreement import (
    attempt,
    loaded,
    require_no_spares,
    require_same_configuration,
    require_time,
    watch_time,
)
from mpitrain.training.replay.record_request import RecordRequest
from mpitrain.training.run_opening import Opening, PreparedRun
from mpitrain.training.run_plan import agreed_layout, beginning, judged_advice, ranks_of
from mpitrain.training.task_scores import require_tasks
from mpitrain.training.tokenizing import OneTokenizer

# limit of the wait for all ranks to start MPI where mpirun --with-ft doesn't end a job that has lost one
START_S = 120.0


class JoinedRanks(NamedTuple):
    """All ranks that were started, with one configuration. notes: for the user.

    job: names a job that lives when a rank has died, in the lock of its run directory; "" for others.
    """

    asked: LoadedConfig
    world: World
    notes: list[str]
    job: str

    @property
    def survives(self) -> bool:
        """Whether the job lives when a rank has died."""
        return bool(self.job)


def open_run(path: str | None, overrides: tuple[str, ...], guard: Guard) -> tuple[PreparedRun, World]:
    """Join the ranks and open the run, without spare ranks. Collective over all ranks; raises as these do."""
    joined = join_ranks(path, overrides, guard)
    joined.world.on_every_rank("looking for spares", lambda: require_no_spares(joined.asked.config))
    opened = open_joined(joined, guard)
    guard.requests.is_unsaved = False  # whoever opened it may take no step
    return opened, joined.world


def join_ranks(path: str | None, overrides: tuple[str, ...], guard: Guard) -> JoinedRanks:
    """Start MPI, and read one configuration on all ranks. Collective; raises InputError alike."""
    guard.place.enter("start", "reading the configuration", BUSY)
    # before MPI starts: its limit (comm.timeout_s) is for that, too
    read = attempt(path, overrides)
    notes = list[str]()
    first = rank_of_launcher()[0] == 0
    recovery, limit_s = RecoveryTable(), Limit(None).seconds
    if isinstance(read, LoadedConfig):
        recovery, limit_s = read.config.recovery, Limit(read.config.comm.timeout_s).seconds
        if first:  # before MPI: no process that uses it starts the scheduler's command
            watch_time(read.config, guard, notes.append)
    survives = recovery.spares > 0 or (recovery.shrink and is_enabled())
    guard.place.name(guard.place.who, min(limit_s, START_S) if survives else limit_s)
    world = guard.connect(revocable=survives)
    guard.place.name(guard.place.who, limit_s)
    # a shell had a rank of an earlier job in its environment
    if isinstance(read, LoadedConfig) and world.rank == 0 and not first:
        watch_time(read.config, guard, notes.append)
    guard.place.enter("start", "checking the configuration", BUSY)
    asked = world.on_every_rank("checking the configuration", lambda: _checked(read, world.size))
    require_same_configuration(world, asked.config)
    notes += _moved_lines(path, overrides, asked.config.run.dir)
    job = ""
    if survives and survives_deaths():
        job = world.on_first_rank("naming the job", lambda: uuid.uuid4().hex)
    return JoinedRanks(asked, world, notes, job)


def open_joined(joined: JoinedRanks, guard: Guard, record: RecordRequest | None = None) -> PreparedRun:
    """Check everything that needs no device, take the run directory, and prepare the tokens on rank 0.

    Collective over the ranks of `joined`. Raises, alike on all ranks, InputError before anything of
    a run is changed, and StoppedEarly when one has to leave before it is done.
    """
    asked, world, notes, job = joined
    first = world.rank == 0
    with guard.place.at("start", "reading model.init", BUSY):
        asked, begun, said = world.on_every_rank("reading model.init", lambda: begun_from_init(asked))
    notes += said * first
    tokenizer = OneTokenizer(world, begun.config.data)
    with guard.place.at("start", "reading the tokenizer", BUSY):
        vocabulary = tokenizer.read(lambda: tokenizer_or_copy(begun.config))
    with guard.place.at("start", "choosing a layout", BUSY):
        config, said = agreed_layout(begun, world, vocabulary)
    notes += said * first
    plan, same = world.on_every_rank(
        "checking the configuration", lambda: _plan(config, world, record, vocabulary)
    )
    require_same_configuration(world, plan.config)
    world.require_same(same)
    _require_files(plan, world)
    notes += judged_advice(config, plan, world, vocabulary)
    guard.leave_if_asked(world)
    _require_device(plan, world)
    guard.leave_if_asked(world)
    given = begun.changed(config, KeyOrigin(PLANNER))
    notes += filter(None, [zero_line(config, plan.config), *idle_settings(plan.config, given.origins)])
    resolved = with_resolved(given, plan.config)
    opening = Opening(asked, resolved, plan, tokenizer, vocabulary, world, guard, record, notes, job)
    try:
        return opening.opened()
    except Exception:
        if joined.survives:
            opening.rundir.release()  # this process opens it again, if a rank has died
        raise


def _resumed(given: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """Return a configuration with the model.init that its run directory records, if that has a step."""
    rundir = RunDir(given.config.run.dir)
    recorded = False
    with suppress(OSError, ValueError):  # a bad name is refused when the directory is taken
        recorded = kind_of(rundir.config) == "a file"
    if not recorded:
        return given, []
    from mpitrain.weights.beginning import has_steps, own_first_step, with_origin_of_run

    if not has_steps(rundir.checkpoints) and not own_first_step(rundir.checkpoints):
        return given, []  # it has nothing to resume from, and begins again
    begun = with_origin_of_run(given, read_with_origins(rundir.config, plugins_of(given.config)))
    return begun.given, begun.lines


def begun_from_init(asked: LoadedConfig) -> tuple[LoadedConfig, LoadedConfig, list[str]]:
    """Return a run's configuration, the same with the model of model.init, and what is to be said of it."""
    asked, said = _resumed(asked)
    begun, more = beginning(asked)
    return asked, begun, [*said, *more]


def _require_files(plan: Plan, world: World) -> None:
    """Refuse loggers, tasks, a model.init or a run.machine that can't be read. Collective."""
    run = plan.config.run
    world.on_first_rank("looking at run.loggers", lambda: require_loggers(run.logger_names))
    world.on_first_rank("looking at run.eval_tasks", lambda: require_tasks(run))
    world.on_first_rank("looking at model.init", lambda: _require_init(plan))
    if run.machine:  # which the end of a run would find out late
        world.on_first_rank("reading run.machine", lambda: find_machine(run.machine))


def _require_init(plan: Plan) -> None:
    """Raise InputError unless model.init has all weights of the model."""
    if plan.config.model.init:
        from mpitrain.weights.beginning import has_steps, source_of

        if not has_steps(RunDir(plan.config.run.dir).checkpoints):
            source_of(plan.config.model.init, plan).close()


def _moved_lines(path: str | None, overrides: tuple[str, ...], run_dir: str) -> list[str]:
    """Say so if the configuration is of a run directory that was moved, and names another one."""
    here = RunDir(os.path.dirname(path or ""))
    asked = any(override.partition("=")[0].strip() == "run.dir" for override in overrides)
    own = os.path.basename(path or "") == here.config.name and os.path.exists(here.metrics)
    if asked or not own or os.path.realpath(here.path) == os.path.realpath(run_dir):
        return []
    notice = f"{shown(path)} is in a run directory, but names another: run.dir = {shown(run_dir)}"
    own = as_override("run.dir", str(here.path))
    return [f"{notice}; --set {own} resumes the run in the same folder"]


def _checked(read: LoadedConfig | InputError, num_ranks: int) -> LoadedConfig:
    """Return a configuration, if what needs neither a layout nor a tokenizer is right. Writes nothing."""
    asked = loaded(read)
    if spares := asked.config.recovery.spares:
        require_fault_tolerance(spares, num_ranks)
    num_threads(asked.config.run)
    require_time(asked.config)
    _require_staging(asked.config.run.staging)
    return asked


def _plan(
    config: Config, world: World, record: RecordRequest | None, vocabulary: Vocabulary
) -> tuple[Plan, dict[str, str]]:
    """Resolve the configuration and prove its schedule; return also what all ranks need alike."""
    if vocabulary.older_end_of_text is None:
        separator(config.data, vocabulary)  # else a run begun before may have one
    plan = plan_for(config, ranks_of(world), vocabulary)
    for of_step in plan.growing or (plan,):
        require_memory(of_step)
    if record:
        record.require(world.size, plan.config.run.steps)
    if profile := ProfileRequest.read(plan.config.run.profile):
        profile.require(world.size, plan.config.run.steps)
    same = {
        "the table of pipeline.schedule": code_identity.digest(repr(plan.training.table)),
        **({"--record": f"{record.rank}:{record.step}"} if record else {}),
        **code_identity.code(),
        **code_identity.code_of_plugins(plan.config),
        **({"the routing of experts.replay": plan.routing.digest} if plan.routing else {}),
    }
    return plan, same


def tokenizer_or_copy(config: Config) -> Tokenizer:
    """Return the tokenizer, or the run directory's copy of it where its file is gone."""
    data = config.data
    rundir = RunDir(config.run.dir)
    try:
        return tokenizer_of(data)
    except DataError:
        with suppress(OSError):
            own = kind_of(rundir.data) == "a folder" and kind_of(rundir.tokenizer) == "a file"
            if own and not is_there(data.tokenizer):
                return load_tokenizer(rundir.tokenizer, data.end_of_text, data.begin_of_text)
        raise


def _require_staging(path: str) -> None:
    """Raise ConfigError unless shards can be written to this directory of the node first."""
    host = socket.gethostname()
    if path and not os.path.isdir(path):
        fault, change = f"no such directory on {host}", "make it on every node"
    elif path and not os.access(path, os.W_OK | os.X_OK):
        fault, change = f"not writable on {host}", "choose another directory"
    else:
        return
    raise ConfigError(f"run.staging = {path}: {fault}; {change}, or leave it out")


def _require_device(plan: Plan, world: World) -> None:
    """Refuse a device or compiler that can't do what is asked; may load torch. Collective."""
    config = plan.config
    direct = config.comm.device == "direct"
    needs = direct or config.precision.compute == "fp8"
    if config.run.compile is True or config.run.device == "cuda" or (config.run.device == "auto" and needs):
        from mpitrain.training.machine.device_placement import place, way_of_messages

        placement = place(plan, world)
        # a child process may have to try it now and again later: a refused run leaves no directory
        if direct:
            way_of_messages(placement, world, "direct", Limit(config.comm.timeout_s).seconds)
