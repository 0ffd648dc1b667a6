"""The run directory and what is in it, taken before torch is loaded: checkpoint, tokens, logs."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.cluster import logs
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import BUSY
from mpitrain.comm.base.world import World
from mpitrain.config import Config, LoadedConfig, plugins_of
from mpitrain.data.corpus import corpus_of
from mpitrain.data.corpus_files import check_source
from mpitrain.data.preparation import Reporter, prepare
from mpitrain.data.read_tokens import Tokens
from mpitrain.data.tokenizer import Vocabulary, separator
from mpitrain.data.tokens import Description, describe, keep_tokenizer, keep_trained, num_prepared
from mpitrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InputError,
    StoppedEarly,
    StorageError,
    counted,
)
from mpitrain.evaluation.tasks import TaskFile
from mpitrain.inputs import shown
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.log_pace import log_pace
from mpitrain.report.loggers.logger_children import Loggers
from mpitrain.training.agreement import still_working
from mpitrain.training.corpora import Corpora, PreparedCorpus
from mpitrain.training.next_commands import prompt_for
from mpitrain.training.replay.record_request import RecordRequest
from mpitrain.training.run_report import RunReport
from mpitrain.training.same_past import (
    change_of_rate,
    order_of,
    require_same_past,
    require_same_routing,
    saved_config,
)
from mpitrain.training.saving.memory_folder import NodeMemory, named_folder
from mpitrain.training.saving.newest import VERIFYING, Newest, newest_whole
from mpitrain.training.task_scores import Tasks, read_tasks
from mpitrain.training.tokenizing import OneTokenizer

SEEN_S = 60.0  # for which a network file system may still say that there is no such file


@dataclass(frozen=True)
class PreparedRun:
    """A plan that holds, with its run directory, its newest checkpoint and its tokens.

    newest: what it resumes from, on disk or in memory. saved: the newest on disk.
    memory: where its copies in memory are, or are to be; None without.
    loggers, prompt, tasks: of rank 0: for a sample of what it trains; by which it is judged.
    notes: for the user.
    passed: the place in the data and the spikes of what this start has done so far, with another batch.
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
    tasks: Tasks
    passed: tuple[int, dict[str, Any]] | None = None


@dataclass
class Opening:
    """The run directory and what is in it, step by step; an error in one undoes what was made.

    job: see RunDir.take().
    before: what the run directory holds; on rank 0.
    gone: why the corpus can't be read, of which the run directory may have what it needs.
    """

    asked: LoadedConfig
    resolved: LoadedConfig
    plan: Plan
    tokenizer: OneTokenizer
    vocabulary: Vocabulary
    world: World
    guard: Guard
    record: RecordRequest | None
    notes: list[str]
    job: str
    before: Config | None = None
    gone: DataError | None = None

    def __post_init__(self) -> None:
        self.config = self.plan.config
        self.rundir = RunDir(self.config.run.dir)
        self.report = RunReport(self.world.rank, 0, log_pace(self.config.run))
        self._still = partial(still_working, world=self.world, guard=self.guard)

    def opened(self) -> PreparedRun:
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
                saved = self._newest_in(self.rundir.checkpoints)
                memory = self._memory()
                newest = self._newest(memory, saved)
                if self.record:
                    world.on_first_rank(
                        "looking at --record", lambda: self.record.require_open(newest.step, self.rundir.path)
                    )
                world.on_every_rank("looking at run.steps", lambda: self._require_steps(newest.step))
                self.guard.leave_if_asked(world)
            prepared = world.on_every_rank("checking data.order", lambda: self._prepared_corpus(newest))
            self.notes += self._replay_lines(newest)
            if self.before is not None and newest.step:
                before = saved_config(newest, self.config) or self.before
                self.notes += filter(None, [change_of_rate(before, self.config, newest.step)])
            with place.at("tokens", "preparing the tokens", BUSY):
                world.on_first_rank(
                    "preparing the tokens", lambda: self._prepare(newest, prepared), self.tokenizer.help
                )
                prepared.copies, prepared.packs = world.on_first_rank(
                    "looking for copies of held-out documents", prepared.find
                )
                world.on_first_rank("keeping the tokenizer", self._keep_tokenizer)
                corpora = world.on_every_rank("opening the tokens", lambda: self._corpora(newest, prepared))
                tasks = self._tasks(corpora.validation_of_sources)
                world.require_same({"the tokens": corpora.digest})
                self.notes += [self._describe_text()] * (world.rank == 0)
                self.guard.leave_if_asked(world, "the tokens are prepared")
            if self.config.run.logs:
                self._open_logs()
            world.on_first_rank("writing config.toml", lambda: self.rundir.begin(self.asked, self.resolved))
            world.on_first_rank("noting which tokens were verified", prepared.keep)
            if memory is not None and self.config.recovery.every:
                memory.make(self.config.recovery.folder)
        except (InputError, StoppedEarly) as error:
            if world.rank == 0:
                self.rundir.undo(keep_data=isinstance(error, StoppedEarly))
            raise
        prompt = self._prompt(corpora) if world.rank == 0 else ""
        return PreparedRun(
            self.plan, self.rundir, corpora, newest, saved, memory, self._loggers(), self.notes, prompt, tasks
        )

    def _tasks(self, sources: Collection[str]) -> Tasks:
        """Return the tasks of run.eval_tasks on rank 0. Collective over all ranks."""
        tasks: dict[str, TaskFile] = {}

        def read() -> None:
            tasks.update(read_tasks(self.plan, self.rundir, self.tokenizer.whole, sources))

        if self.config.run.task_files:
            self.world.on_first_rank("reading run.eval_tasks", read)
        return tasks

    def _prompt(self, corpora: Corpora) -> str:
        beginning = corpora.train.rows(range(1)).tokens[0].tolist()
        return prompt_for(self.tokenizer.whole, beginning, corpus_of(self.config.data).source)

    def _loggers(self) -> Loggers:
        names = self.config.run.logger_names if self.world.rank == 0 else ()
        return Loggers(self.rundir, names, plugins_of(self.config))

    def _open_logs(self) -> None:
        begin = partial(logs.begin, self.rundir.logs, self.world.rank, self.world.size)
        with self.guard.place.at("start", "opening the logs", BUSY):
            self.world.on_every_rank("opening the logs", begin)

    def _newest(self, memory: NodeMemory | None, saved: Newest) -> Newest:
        """Return the newest checkpoint, in memory or `saved`, and note it. Collective."""
        newest = self._newer_in_memory(memory, saved)
        if memory is not None:
            memory.note_resumed(0 if newest is saved else newest.step)
        return newest

    def _newer_in_memory(self, memory: NodeMemory | None, saved: Newest) -> Newest:
        """Return the newest step in memory, if it is after `saved`, else that. Collective.

        None of the last step: that has to be saved on disk.
        """
        self.guard.requests.is_unsaved = False
        if memory is None or not memory.is_used():
            return saved
        from mpitrain.training.saving.copied_step import save_copied_step

        steps = self.config.run.steps
        try:
            memory.make(self.config.recovery.folder)
            self.notes += save_copied_step(memory, saved.step)
            newest = self._newest_in(memory.own_folder, lambda step: saved.step < step < steps)
        except (CheckpointError, StorageError) as error:
            self.notes.append(f"not from memory: {error.args[0]}")
            return saved
        self.guard.requests.is_unsaved = bool(newest.step)
        return newest if newest.step else saved

    def _newest_in(self, folder: Path, *among: Callable[[int], bool]) -> Newest:
        """Return the newest whole step in a folder, of those that count. Collective."""
        note = partial(self.guard.place.enter, "resume", state=BUSY)
        share, needs = self.config.run.verify, self.plan.stored_weights()
        return newest_whole(self.world, folder, share, needs, self.notes.append, note, *among)

    def _memory(self) -> NodeMemory | None:
        """Return where the run is, or is to be, in memory; None if it isn't there. Collective."""
        is_named = self.world.on_first_rank(
            "looking for copies in memory", lambda: named_folder(self.rundir) is not None
        )
        if not (is_named or self.config.recovery.every):
            return None
        return NodeMemory(self.world, self.rundir, self.plan.axes.partner)

    def _require_steps(self, step: int) -> None:
        """Raise ConfigError for a run that is longer already than asked. Changes nothing."""
        if step > self.config.run.steps:
            done = f"{shown(self.rundir.path)} has done {counted(step, 'steps')}"
            change = f"set run.steps above {step} to train further, or choose another run.dir"
            raise ConfigError(f"run.steps = {self.config.run.steps}, but {done}; {change}")

    def _take(self) -> str:
        token, said = self.rundir.take(self.guard.end, self._still, self.job)
        self.notes += [said] * bool(said)
        self.before = self.rundir.require_same_run(self.config)
        if self.before is None:  # what names copies in memory was put here: this run has made none
            self.rundir.recovery.unlink(missing_ok=True)
        data = self.config.data
        try:
            for part in corpus_of(data).parts:
                check_source(part.source, part.path, corpus_of(data).key)
            if data.val_path:
                check_source(data.source, data.val_path, "data.val_path")
        except DataError as error:
            self.gone = error
        return token

    def _describe_text(self) -> str:
        corpus = describe(self.rundir.data)
        if not corpus.tally.documents:
            return ""
        special = "special tokens written out in a text are tokenized as plain text"
        tokens = f"tokens: {self.vocabulary.description}; {special}"
        return f"text: {corpus.tally.describe(corpus.count)}\n{tokens}"

    def _replay_lines(self, newest: Newest) -> list[str]:
        routing = self.plan.routing
        steps = range(newest.step + 1, self.config.run.steps + 1)
        return [said] if routing and (said := routing.lacks(steps)) else []

    def _prepared_corpus(self, newest: Newest) -> PreparedCorpus:
        order = order_of(self.config.data.order, newest, self.rundir.checkpoints)
        return PreparedCorpus(self.config, self.rundir.data, self.vocabulary, order, self._still)

    def _prepare(self, newest: Newest, prepared: PreparedCorpus) -> None:
        require_same_routing(newest, self.plan, self.rundir.checkpoints)

        def accept(description: Description, tokens: Tokens, ends: np.ndarray) -> None:
            if newest.step and newest.data not in (description.content, description.digest):
                now = f"{corpus_of(self.config.data).source} gives now{self._with_another_tokenizer()}"
                raise CheckpointError(
                    f"{self.rundir.checkpoints}: trained on other data than {now}; choose another run.dir"
                )
            if ends.size:
                separator(self.config.data, self.vocabulary)
            train = prepared.corpora_of(tokens, ends, description).train
            require_same_past(newest, self.config, self.rundir.checkpoints, train)

        data = self.config.data
        if self.gone:
            source, folder = corpus_of(data).identity, self.rundir.data
            if not keep_trained(folder, source, self.vocabulary, newest.data, self._still):
                raise self.gone
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

    def _with_another_tokenizer(self) -> str:
        """Say so if the tokens that are there were made with another one."""
        with suppress(DataError):
            if describe(self.rundir.data).origin.tokenizer != self.vocabulary.identity:
                return f', with another tokenizer (data.tokenizer = "{shown(self.config.data.tokenizer)}")'
        return ""

    def _keep_tokenizer(self) -> None:
        keep_tokenizer(self.rundir.data, self.tokenizer.whole)
        begins = not os.path.lexists(self.rundir.config)  # else what is there is complete
        init, name = self.config.model.init, self.config.data.tokenizer
        if begins and (init or name != "bytes"):
            from mpitrain.weights.beginning import keep_companions

            keep_companions(init, self.tokenizer.whole, name, self.rundir.came_along)

    def _corpora(self, newest: Newest, prepared: PreparedCorpus) -> Corpora:
        corpora = prepared.corpora()
        require_same_past(newest, self.config, self.rundir.checkpoints, corpora.train)
        return corpora
