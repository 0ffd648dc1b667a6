"""Files of text and tasks, scored by a step of a run, on all ranks of this job."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from mpitrain.checkpoint import load
from mpitrain.checkpoint.retention import BEST, best_step
from mpitrain.cluster.entry import warn
from mpitrain.cluster.rundir import RunDir, read_config, require_run
from mpitrain.cluster.status_board import BUSY, RankStatus
from mpitrain.comm.base.world import World
from mpitrain.config import LoadedConfig
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.data.tokens import describe
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.evaluation.evaluated_config import at_length, evaluated, given_keys, usable_context
from mpitrain.evaluation.scorer import Questions, scorer_of
from mpitrain.evaluation.tasks import TaskFile
from mpitrain.evaluation.texts import EvaluatedVocabulary, TextFile
from mpitrain.inputs import shown
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.plan.settings.resolve import resolve
from mpitrain.training.step_documents import tokenizer_of_run
from mpitrain.weights.companions import ends_of_run, length_of_run, prefix_of_texts

MOST_CONTEXT = 2048  # by default: models read up to a million tokens, which no memory holds


@dataclass(frozen=True)
class EvaluationRequest:
    """What is evaluated.

    step: None: the newest that is whole; BEST: that of the least validation loss.
    context: tokens that the model sees; None: its own length, 2,048 at most.
    stride: tokens that each window after the first scores; None: all of them.
    """

    path: str
    step: int | Literal["best"] | None = None
    data: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    shots: int = 0
    context: int | None = None
    stride: int | None = None
    text_key: str = "text"
    tokenizer_file: str | None = None


class EvaluatedRun:
    """A run's model, for this number of ranks; and on rank 0 what it is asked. Raises InputError."""

    def __init__(self, request: EvaluationRequest, given: LoadedConfig, num_ranks: int, first: bool):
        self.rundir = RunDir(request.path)
        require_run(self.rundir)
        config = read_config(self.rundir.config)
        self.tokenizer = tokenizer_of_run(self.rundir, config.data, request.tokenizer_file)
        self._num_ranks = num_ranks
        self.config = evaluated(config, given_keys(given), num_ranks)
        longest = max(config.data.sequence, config.model.positions or 0, length_of_run(self.rundir))
        if config.model.positions and request.context and request.context > config.model.positions:
            raise ConfigError(
                f"--context {request.context}: the model has vectors of {config.model.positions} positions; "
                "give that many at most"
            )
        context = request.context or min(longest, MOST_CONTEXT)
        self.context = request.context or usable_context(self.config, context)
        self.stride = min(request.stride or self.context, self.context)
        self.texts: list[TextFile] = []
        self.tasks: list[TaskFile] = []
        self.plan = self.plan_at(1)
        if first:
            begin, end = _special_tokens(self.rundir, self.tokenizer)
            own = request.tokenizer_file is None
            named = prefix_of_texts(self.rundir, config.data) if own else None
            prefix = end if named is None else named
            self.vocabulary = EvaluatedVocabulary(self.tokenizer, begin, prefix)
            ends = ends_of_run(self.rundir) | frozenset(() if end is None else (end,))
            self.texts = [TextFile.read(name, request.text_key, self.vocabulary) for name in request.data]
            self.tasks = [TaskFile.read(name, request.shots, self.vocabulary, ends) for name in request.tasks]

    def plan_at(self, longest: int) -> Plan:
        """Return the plan for requests of at most so many inputs. Raises ConfigError."""
        config = at_length(self.config, longest, self.context)
        return plan_of(resolve(config, self._num_ranks, self.tokenizer.vocab, needed=self.tokenizer.needed))

    def longest(self, kind: str) -> int:
        """Return the most inputs of a request, on rank 0."""
        if kind == "tasks":
            return max(task.longest(self.context) for task in self.tasks)
        prefix = self.vocabulary.prefix is not None
        lengths = [len(tokens) - 1 + prefix for text in self.texts for tokens in text.tokens]
        return min(self.context, max(lengths))

    def questions(self, kind: str, number: int) -> Questions:
        """Return what a file asks, on rank 0."""
        if kind == "tasks":
            return self.tasks[number].ask(self.context)
        return self.texts[number].ask(self.vocabulary.prefix, self.context, self.stride)


def evaluate(
    request: EvaluationRequest, given: LoadedConfig, world: World, place: RankStatus
) -> dict[str, Any]:
    """Return the result on rank 0: by file and task. Collective; raises InputError on all ranks."""
    run = world.on_every_rank(
        "reading what is evaluated", lambda: EvaluatedRun(request, given, world.size, world.rank == 0)
    )
    with place.at("start", "verifying the checkpoint", BUSY):
        step = world.on_first_rank("verifying the checkpoint", lambda: _step_of(run, request.step))
    result: dict[str, Any] = {"step": step, "context": run.context, "stride": run.stride}
    result |= {"ranks": world.size, "shots": request.shots}
    for kind, names in (("data", request.data), ("tasks", request.tasks)):
        if names:
            result[kind] = _answers(run, kind, names, step, world, place)
    return result


def _answers(
    run: EvaluatedRun, kind: str, names: tuple[str, ...], step: int, world: World, place: RankStatus
) -> dict[str, Any]:
    """Return the results of files of a kind, by their names, on rank 0. Collective."""
    longest = world.on_first_rank("reading texts", lambda: run.longest(kind))
    plan = world.on_every_rank("planning", lambda: _checked(run.plan_at(longest)))
    answers = {}
    with scorer_of(plan, world, place, run.rundir, step) as scorer:
        for number, name in enumerate(names):
            questions = run.questions(kind, number) if world.rank == 0 else None
            with place.at("evaluation", f"scoring {shown(name)}"):
                answers[name] = scorer.answer(questions)
    return answers


def _checked(plan: Plan) -> Plan:
    require_memory(plan)
    _ = plan.evaluation  # made, and proved, when it is asked for
    return plan


def _step_of(run: EvaluatedRun, step: int | Literal["best"] | None) -> int:
    """Return the step whose weights are read: a given one, or the newest that is whole."""
    needs = run.plan.stored_weights()
    folder = run.rundir.checkpoints
    if step == BEST:
        step = best_step(folder)
    if step is not None:
        with load.open_step(folder, step, needs):
            return step
    saved = load.open_latest(folder, warn=lambda text: warn(f"warning: {text}"), needs=needs)
    if saved is None:
        raise CheckpointError(
            f"{shown(folder)}: no checkpoint yet; wait for the first one (run.save_every) and try again"
        )
    with saved:
        return saved.step


def _special_tokens(rundir: RunDir, tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """Return the tokens that begin and end a text, as the run's own tokens have them."""
    with suppress(DataError, OSError):
        origin = describe(rundir.data).origin
        if origin.form > 1:
            return origin.begin_of_text, origin.end_of_text
    return tokenizer.begin_of_text, tokenizer.end_of_text
