"""What `mpitrain run` settles before torch is loaded.

configuration, run directory, newest checkpoint and tokens.

So what a user got wrong is refused in a second; to load torch, all ranks of a node at once, takes
several. Everything is checked before anything of the run is written, and whatever is wrong on one
rank alone is raised on all.
"""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.cluster import code_identity, logs
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.launch import rank_of_launcher
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.rundir import RunDir, read_with_origins
from mpitrain.cluster.status_board import BUSY
from mpitrain.cluster.threads import num_threads
from mpitrain.comm.base.world import World, connect
from mpitrain.config import Config, LoadedConfig, as_override, plugins_of
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.data.corpus import corpus_of
from mpitrain.data.corpus_files import check_source
from mpitrain.data.mixture import (
    MixtureSampler,
    Samplers,
    SkippingSampler,
    mixture_of,
    places_after_skips,
)
from mpitrain.data.preparation import Reporter, prepare
from mpitrain.data.tokenizer import Tokenizer, Vocabulary, load_tokenizer, separator, tokenizer_of
from mpitrain.data.tokens import (
    Description,
    describe,
    keep_tokenizer,
    keep_trained,
    num_prepared,
)
from mpitrain.errors import CheckpointError, ConfigError, DataError, InputError, StoppedEarly, StorageError
from mpitrain.inputs import is_there, kind_of, shown
from mpitrain.origins import PLANNER, KeyOrigin
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.alternatives import zero_line
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.plan.predict.step_time.machine import find_machine
from mpitrain.plan.settings.key_origins import with_resolved
from mpitrain.plan.settings.log_pace import log_pace
from mpitrain.plan.settings.profile_request import ProfileRequest
from mpitrain.plan.settings.rule_table import idle_settings
from mpitrain.report.loggers.catalog import require_loggers
from mpitrain.report.loggers.logger_children import Loggers
from mpitrain.training.agreed_layout import agreed_layout
from mpitrain.training.agreement import attempt, require_same_configuration, require_time, watch_time
from mpitrain.training.corpora import Corpora, PreparedCorpus
from mpitrain.training.going_on import change_of_rate, order_of, prompt_for, saved_config
from mpitrain.training.replay.record_request import RecordRequest
from mpitrain.training.run_plan import beginning, judged_advice, resolved_plan
from mpitrain.training.run_report import RunReport
from mpitrain.training.saving.memory_folder import NodeMemory, named_folder
from mpitrain.training.saving.newest import VERIFYING, Newest, newest_whole
from mpitrain.training.tokenizing import OneTokenizer

SEEN_S = 60.0  # for which a network file system may still say that there is no such file


@dataclass(frozen=True)
class PreparedRun:
    """A plan that holds, with its run directory, its newest checkpoint and its tokens.

    newest: what it resumes from, on disk or in memory.
    saved: the newest on disk.
    memory: where its copies in memory are, or are to be; None without.
    loggers: of rank 0; none on others.
    notes: for the user.
    passed: the place in the data and the spikes of what this start has done so far, with another batch.
    prompt: for a sample of what it trains; on rank 0.
    """

    plan: Plan
    rundir: RunDir
    corpora: Corpora
    newest: Newest
    saved: Newest
    memory: NodeMemory | None
    loggers: Loggers
    notes: list[str]
    prompt: str
    passed: tuple[int, dict[str, Any]] | None = None


def open_run(
    path: str | None,
    overrides: tuple[str, ...],
    guard: Guard,
    record: RecordRequest | None = None,
) -> tuple[PreparedRun, World]:
    """Start MPI, check everything that needs no device, take the run directory, and prepare the
    tokens on rank 0.

    Collective over all ranks. Raises InputError, alike on all ranks and before anything of a run is
    changed, for whatever the user has to change, and StoppedEarly on all ranks when one has to
    leave before it is done.
    """
    guard.place.enter("start", "reading the configuration", BUSY)
    # before MPI starts: its limit (comm.timeout_s) is for that, too
    read = attempt(path, overrides)
    notes = list[str]()
    first = rank_of_launcher()[0] == 0
    if isinstance(read, LoadedConfig):
        guard.place.name(guard.place.who, Limit(read.config.comm.timeout_s).seconds)
        # before MPI starts, which takes some of that time; and no process that uses MPI starts the
        # scheduler's command
        if first:
            watch_time(read.config, guard, notes.append)
    world = connect(guard.place, lambda: bool(guard.requests.why()))
    guard.join(world)
    # a shell had a rank of an earlier job in its environment
    if isinstance(read, LoadedConfig) and world.rank == 0 and not first:
        watch_time(read.config, guard, notes.append)
    guard.place.enter("start", "checking the configuration", BUSY)
    asked = world.on_every_rank("checking the configuration", lambda: _checked(read))
    require_same_configuration(world, asked.config)
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
    notes += _moved_lines(path, overrides, plan.config.run.dir)
    given = begun.changed(config, KeyOrigin(PLANNER))
    notes += filter(None, [zero_line(config, plan.config), *idle_settings(plan.config, given.origins)])
    resolved = with_resolved(given, plan.config)
    return _Opening(asked, resolved, plan, tokenizer, vocabulary, world, guard, record, notes).open(), world


def _resumed(given: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """Return a configuration with the model.init that its run directory records, if that has a step."""
    rundir = RunDir(given.config.run.dir)
    try:
        if kind_of(rundir.config) != "a file":
            return given, []
    except (OSError, ValueError):  # of a name that can't be is said when the directory is taken
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
    """Refuse a model.init or run.machine that can't be read, and loggers that aren't there.

    Collective over all ranks.
    """
    loggers = plan.config.run.logger_names
    world.on_first_rank("looking at run.loggers", lambda: require_loggers(loggers))
    checkpoints = RunDir(plan.config.run.dir).checkpoints
    world.on_first_rank("looking at model.init", lambda: _require_init(plan, checkpoints))
    if plan.config.run.machine:
        world.on_first_rank("reading run.machine", lambda: _require_machine(plan.config.run.machine))


def _require_init(plan: Plan, checkpoints: Path) -> None:
    """Raise InputError unless model.init has all weights of the model, before anything is written."""
    if plan.config.model.init:
        from mpitrain.weights.beginning import has_steps, source_of

        if not has_steps(checkpoints):
            source_of(plan.config.model.init, plan).close()


def _moved_lines(path: str | None, overrides: tuple[str, ...], run_dir: str) -> list[str]:
    """Say so if the configuration is that of a run directory, which was moved or copied, and names
    another one.
    """
    here = RunDir(os.path.dirname(path or ""))
    asked = any(override.partition("=")[0].strip() == "run.dir" for override in overrides)
    own = os.path.basename(path or "") == here.config.name and os.path.exists(here.metrics)
    if asked or not own or os.path.realpath(here.path) == os.path.realpath(run_dir):
        return []
    notice = f"{shown(path)} lies in a run directory, but names another: run.dir = {shown(run_dir)}"
    own = as_override("run.dir", str(here.path))
    return [f"{notice}; --set {own} resumes the run in the same folder"]


def _checked(read: LoadedConfig | InputError) -> LoadedConfig:
    """Return a configuration, if what needs neither ranks nor a tokenizer is right. Writes nothing."""
    if isinstance(read, InputError):
        raise read
    num_threads(read.config.run)
    require_time(read.config)
    _require_staging(read.config.run.staging)
    return read


def _plan(
    config: Config, world: World, record: RecordRequest | None, vocabulary: Vocabulary
) -> tuple[Plan, dict[str, str]]:
    """Resolve the configuration and prove its schedule; return also what all ranks need alike.

    It sends nothing.
    """
    if vocabulary.older_end_of_text is None:
        separator(config.data, vocabulary)  # else a run begun before may have one
    plan = resolved_plan(config, world, vocabulary)
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
    if path and not os.path.isdir(path):
        raise ConfigError(
            f"run.staging = {path}: no such directory on {socket.gethostname()}; make it on every node, or "
            "leave it out"
        )
    if path and not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run.staging = {path}: not writable on {socket.gethostname()}; choose another directory, or "
            "leave it out"
        )


def _require_machine(name: str) -> None:
    """Raise ConfigError if run.machine is no machine, which the end of a run would find out late."""
    find_machine(name)


def _require_device(plan: Plan, world: World) -> None:
    """Refuse a device that can't do or hold what is asked, and compilers, before the run directory is made.

    It needs torch.

    Collective over all ranks.
    """
    config = plan.config
    direct = config.comm.device == "direct"
    needs = direct or config.precision.compute == "fp8"
    if config.run.compile is True or config.run.device == "cuda" or (config.run.device == "auto" and needs):
        from mpitrain.training.machine.device_placement import place, way_of_messages

        placement = place(plan, world)
        # a child process may have to try it now and again later: a refused run leaves no directory
        if direct:
            way_of_messages(placement, world, "direct", Limit(config.comm.timeout_s).seconds)


class _Opening:
    """The run directory and what is in it, step by step.

    Each is collective, and an error in one undoes what was made.
    """

    def __init__(
        self,
        asked: LoadedConfig,
        resolved: LoadedConfig,
        plan: Plan,
        tokenizer: OneTokenizer,
        vocabulary: Vocabulary,
        world: World,
        guard: Guard,
        record: RecordRequest | None,
        notes: list[str],
    ):
        self.plan = plan
        self.config = plan.config
        self.world = world
        self.guard = guard
        self.record = record
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.report = RunReport(world.rank, 0, log_pace(self.config.run))
        self.asked, self.resolved = asked, resolved
        self.rundir, self.notes = RunDir(self.config.run.dir), notes
        self.before: Config | None = None  # what the run directory holds; on rank 0
        self.gone: DataError | None = None
        self.newest: Newest | None = None

    def open(self) -> PreparedRun:
        world = self.world
        place = self.guard.place
        try:
            with place.at("start", "taking the run directory", BUSY):
                token = world.on_first_rank("taking the run directory", self._take)
                patience_s = SEEN_S if world.num_nodes > 1 else 0.0
                world.on_every_rank(
                    "looking for the run directory", lambda: self.rundir.require_seen(token, patience_s)
                )
            with place.at("resume", VERIFYING, BUSY):
                needs = self.plan.stored_weights()
                share = self.config.run.verify
                folder = self.rundir.checkpoints

                def each(what: str) -> None:
                    place.enter("resume", what, BUSY)

                saved = newest_whole(world, folder, share, needs, self.notes.append, each)
                memory = self._memory()
                newest = self._newer_in_memory(memory, saved, needs, each)
                if self.record:
                    world.on_first_rank(
                        "looking at --record", lambda: self.record.require_open(newest.step, self.rundir.path)
                    )
                world.on_every_rank("looking at run.steps", lambda: self._require_steps(newest.step))
                self.guard.leave_if_asked(world)
            prepared = world.on_every_rank("checking data.order", lambda: self._prepared_corpus(newest))
            self.newest = newest
            self.notes += self._replay_lines(newest)
            if self.before is not None and newest.step:
                before = saved_config(newest, self.config) or self.before
                self.notes += filter(None, [change_of_rate(before, self.config, newest.step)])
            with place.at("tokens", "preparing the tokens", BUSY):
                world.on_first_rank(
                    "preparing the tokens", lambda: self._prepare(newest, prepared), self.tokenizer.help
                )
                prepared.copies = world.on_first_rank(
                    "looking for copies of held-out documents", prepared.find_copies
                )
                world.on_first_rank("keeping the tokenizer", self._keep_tokenizer)
                corpora = world.on_every_rank("opening the tokens", lambda: self._corpora(prepared))
                world.require_same({"the tokens": corpora.digest})
                self.notes += [self._describe_text()] * (world.rank == 0)
                self.guard.leave_if_asked(world, "the tokens are prepared")
            if self.config.run.logs:
                self._open_logs()
            world.on_first_rank("writing config.toml", lambda: self.rundir.begin(self.asked, self.resolved))
            if memory is not None and self.config.recovery.every:
                memory.make(self.config.recovery.folder)
        except (InputError, StoppedEarly) as error:
            if world.rank == 0:
                self.rundir.undo(keep_data=isinstance(error, StoppedEarly))
            raise
        prompt = self._prompt(corpora) if world.rank == 0 else ""
        loggers = self._loggers()
        return PreparedRun(
            self.plan, self.rundir, corpora, newest, saved, memory, loggers, self.notes, prompt
        )

    def _prompt(self, corpora: Corpora) -> str:
        beginning = corpora.train.sequences(range(1))[0].tolist()
        return prompt_for(self.tokenizer.whole, beginning, corpus_of(self.config.data).source)

    def _loggers(self) -> Loggers:
        names = self.config.run.logger_names if self.world.rank == 0 else ()
        return Loggers(self.rundir, names, plugins_of(self.config))

    def _open_logs(self) -> None:
        world = self.world
        with self.guard.place.at("start", "opening the logs", BUSY):
            world.on_every_rank(
                "opening the logs", lambda: logs.begin(self.rundir.logs, world.rank, world.size)
            )

    def _newer_in_memory(
        self,
        memory: NodeMemory | None,
        saved: Newest,
        needs: Mapping[str, Any],
        each: Callable[[str], object],
    ) -> Newest:
        """Return the newest checkpoint in memory, if it is newer than what is saved.

        None of the last step: that has to be saved on disk. Collective over all ranks.
        """
        if memory is None or not memory.is_used():
            return saved
        from mpitrain.training.saving.copied_step import save_copied_step

        steps = self.config.run.steps
        try:
            memory.make(self.config.recovery.folder)
            self.notes += filter(None, [save_copied_step(memory, saved.step)])
            newest = newest_whole(
                self.world,
                memory.own_folder,
                self.config.run.verify,
                needs,
                self.notes.append,
                each,
                lambda step: saved.step < step < steps,
            )
        except (CheckpointError, StorageError) as error:
            self.notes.append(f"not from memory: {error.args[0]}")
            return saved
        return newest if newest.step else saved

    def _memory(self) -> NodeMemory | None:
        """Return where the run is, or is to be, in memory; None if it isn't there.

        Collective over all ranks.
        """
        is_named = self.world.on_first_rank(
            "looking for copies in memory", lambda: named_folder(self.rundir) is not None
        )
        if not (is_named or self.config.recovery.every):
            return None
        return NodeMemory(self.world, self.rundir, self.plan.axes.partner)

    def _require_steps(self, step: int) -> None:
        """Raise ConfigError for a run that is longer already than asked. Changes nothing."""
        if step > self.config.run.steps:
            raise ConfigError(
                f"run.steps = {self.config.run.steps}, but {shown(self.rundir.path)} has done {step} steps; "
                f"set run.steps above {step} to train further, or choose another run.dir"
            )

    def _take(self) -> str:
        token, said = self.rundir.take(self.guard.end, self._still)
        self.notes += [said] * bool(said)
        self.before = self.rundir.require_same_run(self.config)
        data = self.config.data
        try:
            for part in corpus_of(data).parts:
                check_source(part.source, part.path, corpus_of(data).key)
            if data.val_path:
                check_source(data.source, data.val_path, "data.val_path")
        except DataError as error:
            self.gone = error  # the run directory may have what it needs of it
        return token

    def _describe_text(self) -> str:
        """Say what was read and what wasn't: files that are passed over without a word are missed
        by nobody.
        """
        corpus = describe(self.rundir.data)
        special = f"{self.vocabulary.description}; special tokens that are spelled out in a text are text"
        return (
            f"text: {corpus.tally.describe(corpus.count)}\ntokens: {special}"
            if corpus.tally.documents
            else ""
        )

    def _replay_lines(self, newest: Newest) -> list[str]:
        routing = self.plan.routing
        steps = range(newest.step + 1, self.config.run.steps + 1)
        return [said] if routing and (said := routing.lacks(steps)) else []

    def _require_same_routing(self, newest: Newest) -> None:
        routing = self.plan.routing
        if routing and newest.routing not in ("", routing.digest):
            what = (
                f"{self.rundir.checkpoints}: trained with another content of experts.replay = "
                f"{shown(self.config.experts.replay)}"
            )
            raise CheckpointError(f"{what} than it has now; put back what it had, or choose another run.dir")

    def _prepared_corpus(self, newest: Newest) -> PreparedCorpus:
        order = order_of(self.config.data.order, newest, self.rundir.checkpoints)
        return PreparedCorpus(self.config, self.rundir.data, self.vocabulary, order)

    def _prepare(self, newest: Newest, prepared: PreparedCorpus) -> None:
        self._require_same_routing(newest)

        def accept(description: Description, tokens: np.ndarray, ends: np.ndarray) -> None:
            if newest.step and newest.data not in (description.content, description.digest):
                now = f"{corpus_of(self.config.data).source} gives now{self._with_another_tokenizer()}"
                raise CheckpointError(
                    f"{self.rundir.checkpoints}: trained on other data than {now}; choose another run.dir"
                )
            if ends.size:
                separator(self.config.data, self.vocabulary)
            train, _, _ = prepared.samplers(tokens, ends, description.tally)
            self._require_same_past(train)

        data = self.config.data
        if self.gone and not self._keeps_trained(newest):
            raise self.gone
        if self.gone:
            where = f"using the tokens in {shown(self.rundir.data)}, which the run has trained on"
            self.notes.append(f"{self.gone.args[0].partition(';')[0]}; {where}")
            return
        try:
            prepare(
                corpus_of(data),
                self.tokenizer.whole,
                self.rundir.data,
                report=Reporter(self._still, self.report.say),
                accept=accept,
                trained=newest.data,
                encoder_of=self.tokenizer.encoder,
                shared=data.tokens,
            )
        except StoppedEarly as early:
            count = num_prepared(self.rundir.data)
            raise StoppedEarly(early.where, early.why, f"{count:,} tokens are prepared and kept") from early

    def _keeps_trained(self, newest: Newest) -> bool:
        source = corpus_of(self.config.data).identity
        return keep_trained(self.rundir.data, source, self.vocabulary, newest.data, self._still)

    def _with_another_tokenizer(self) -> str:
        """Say so if the tokens that are there were made with another one."""
        with suppress(DataError):
            if describe(self.rundir.data).origin.tokenizer != self.vocabulary.identity:
                return f', with another tokenizer (data.tokenizer = "{shown(self.config.data.tokenizer)}")'
        return ""

    def _keep_tokenizer(self) -> None:
        keep_tokenizer(self.rundir.data, self.tokenizer.whole)
        begins = not os.path.lexists(self.rundir.config)  # else what is there is complete
        if begins and (self.config.model.init or self.config.data.tokenizer != "bytes"):
            from mpitrain.weights.beginning import keep_companions

            data = self.config.data
            keep_companions(
                self.config.model.init, self.tokenizer.whole, data.tokenizer, self.rundir.came_along
            )

    def _corpora(self, prepared: PreparedCorpus) -> Corpora:
        corpora = prepared.corpora()
        self._require_same_past(corpora.train)
        return corpora

    def _require_same_past(self, train: Samplers) -> None:
        """Raise CheckpointError if weights changed for steps that the run has done already."""
        newest = self.newest
        before = saved_config(newest, self.config) if newest and newest.step else None
        if newest is None or before is None:
            return
        self._require_same_growth(newest, before)
        read = newest.sequences or BatchSizes(before.batch).before(newest.step + 1)
        self._require_same_skip(newest, before, read)
        train = train.whole if isinstance(train, SkippingSampler) else train
        if isinstance(train, MixtureSampler):
            self._require_same_mixture(newest, before, read, train)

    def _require_same_mixture(self, newest: Newest, before: Config, read: int, train: MixtureSampler) -> None:
        """Raise CheckpointError unless the sequences that the run has read have the sources that they had."""
        now, past = BatchSizes(self.config.batch), BatchSizes(before.batch)
        sizes = train.sizes
        same = len(before.data.sources) == len(sizes)
        if same and mixture_of(before.data, past, sizes).until(read) == train.mixture.until(read):
            return
        what = (
            f"{self.rundir.checkpoints}: data.sources had other weights in the {newest.step} steps that "
            "are done"
        )
        if now.at(1) != past.at(1) and before.data.sources == self.config.data.sources:
            raise CheckpointError(
                f"{what} with batch.global = {past.at(1)}, as weights change at a step; keep it, and set "
                f"batch.growth = [[{newest.step + 1}, {now.at(1)}]]"
            )
        first = next(step for step in count(newest.step + 1) if now.before(step) >= read)
        raise CheckpointError(
            f"{what}; keep those, and give new ones from a later step on: weight = [[1, ...], [{first}, ...]]"
        )

    def _require_same_growth(self, newest: Newest, before: Config) -> None:
        """Raise CheckpointError if batches or rows changed for steps that the run has done already."""
        if not any(config.batch.growth or config.batch.lengths for config in (before, self.config)):
            return  # another batch.global reads on from where the run is
        past, now = (BatchSizes(config.batch) for config in (before, self.config))
        first = now.first_difference(past, newest.step, self.config.data.sequence)
        if first is None:
            return
        raise CheckpointError(
            f"{self.rundir.checkpoints}: batch.growth or batch.lengths was another one from step {first} on, "
            f"and {newest.step} steps are done; keep what it was for these, and give new ones from step "
            f"{newest.step + 1} on"
        )

    def _require_same_skip(self, newest: Newest, before: Config, read: int) -> None:
        """Raise CheckpointError if data.skip changed for sequences that were passed already."""
        reached = int(places_after_skips([read], before.data.skip)[0])
        changed = {*before.data.skip} ^ {*self.config.data.skip}
        passed = sorted(first for first, _ in changed if first < reached)
        if passed:
            raise CheckpointError(
                f"{self.rundir.checkpoints}: data.skip has another range from sequence {passed[0]:,} on, "
                f"which step {newest.step} has passed; keep what it was up to there, or remove the "
                "checkpoints after it, to resume from an earlier one"
            )

    def _still(self, what: str) -> None:
        """Tell the watchdog and the other ranks that this one still works.

        Raises StoppedEarly if one of them was asked to leave.
        """
        place = self.guard.place
        place.enter(place.phase, what, BUSY)
        another = "another rank was asked to leave" if self.world.beat() else ""
        if why := self.guard.requests.why() or another:
            raise StoppedEarly(f"{place.phase}, {what}", why)
