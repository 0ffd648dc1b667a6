"""Files of text and tasks, scored by a step of a run, on all ranks of this job."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.checkpoint import load
from mpitrain.checkpoint.retention import best_step
from mpitrain.cluster.entry import warn
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.rundir import RunDir, read_config, require_run
from mpitrain.cluster.status_board import BUSY, WAITING, RankStatus
from mpitrain.comm.base.world import World
from mpitrain.commands.evaluation.evaluated_config import at_length, evaluated, given_keys, usable_context
from mpitrain.commands.requests import EvaluationRequest
from mpitrain.config import LoadedConfig
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.evaluation.scorer import Scorer
from mpitrain.evaluation.tasks import TaskFile
from mpitrain.evaluation.texts import TextFile
from mpitrain.evaluation.vocabulary import EvaluatedVocabulary
from mpitrain.evaluation.windows import Questions
from mpitrain.inputs import shown
from mpitrain.model.families.catalog import plan_for
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.training.machine.device_placement import place as choose_place
from mpitrain.training.machine.device_placement import way_of_messages
from mpitrain.training.step_documents import tokenizer_of_run
from mpitrain.weights.beginning import checkpoint_source
from mpitrain.weights.companions import length_of_run
from mpitrain.weights.first_weights import fill

MOST_CONTEXT = 2048  # by default: models read up to a million tokens, which no memory holds


class EvaluatedRun:
    """A run's model, for this number of ranks; and on rank 0 what it is asked. Raises InputError."""

    def __init__(self, request: EvaluationRequest, given: LoadedConfig, num_ranks: int, first: bool):
        self.rundir = RunDir(request.path)
        require_run(self.rundir)
        config = read_config(self.rundir.config)
        self.tokenizer = tokenizer_of_run(self.rundir, config.data, request.tokenizer)
        self._num_ranks = num_ranks
        self.config = evaluated(config, given_keys(given), num_ranks)
        longest = max(config.data.sequence, config.model.positions or 0, length_of_run(self.rundir))
        if config.model.positions and request.context and request.context > config.model.positions:
            raise ConfigError(
                f"--context {request.context}: the model has vectors of {config.model.positions} "
                "positions; give that many at most"
            )
        context = request.context or min(longest, MOST_CONTEXT)
        self.context = request.context or usable_context(self.config, context)
        self.stride = request.stride or self.context
        if self.stride > self.context:
            raise ConfigError(
                f"--stride {self.stride}: longer than the context of {self.context} tokens; give "
                "that many at most, or a longer --context"
            )
        self.texts: list[TextFile] = []
        self.tasks: list[TaskFile] = []
        self.plan = self.plan_at(1)
        if first:
            own = request.tokenizer is None
            self.vocabulary = EvaluatedVocabulary.of_run(self.rundir, config.data, self.tokenizer, own)
            self.texts = [TextFile.read(name, request.text_key, self.vocabulary) for name in request.data]
            self.tasks = [
                TaskFile.read(name, "--tasks", request.shots, self.vocabulary) for name in request.tasks
            ]

    def plan_at(self, longest: int) -> Plan:
        """Return the plan for requests of at most so many inputs. Raises ConfigError."""
        config = at_length(self.config, longest, self.context)
        return plan_for(config, self._num_ranks, self.tokenizer)

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
    """Return the results by file, on rank 0. Collective."""
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
    require_memory(plan, training=False)
    _ = plan.evaluation  # made, and proved, when it is asked for
    return plan


def _step_of(run: EvaluatedRun, step: int | str | None) -> int:
    """Return the step that is read: a given one, or the newest that is whole."""
    needs = run.plan.stored_weights()
    folder = run.rundir.checkpoints
    if isinstance(step, str):
        step = best_step(folder, step)
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


@contextmanager
def scorer_of(plan: Plan, world: World, place: RankStatus, rundir: RunDir, step: int) -> Iterator[Scorer]:
    """Build the communicators and the model, with the weights of a step. Collective over all ranks.

    Raises InputError, alike on all ranks.
    """
    placement = choose_place(plan, world, training=False)
    limit_s = Limit(plan.config.comm.timeout_s).seconds
    way = way_of_messages(placement, world, plan.config.comm.device, limit_s)
    with place.at("build", "making the communicators", WAITING):
        mesh = build_mesh(plan, world.comm, place, way, placement.use)
    place.name(f"{mesh}", limit_s)
    with place.at("build", "building the model", BUSY):
        actor = Actor(plan, mesh, placement.device, place=place, compiled=placement.compiled, training=False)

    def read() -> None:
        with closing(checkpoint_source(load.open_step(rundir.checkpoints, step), plan)) as source:
            fill(actor.gradients.pieces, source, plan.config.run.seed)

    with place.at("resume", f"reading step {step}", BUSY):
        world.on_every_rank(f"reading step {step}", read)
    with place.at("resume", "spreading the weights"):
        actor.restored(0)
    actor.settle()
    yield Scorer(plan, world, actor)
    with place.at("end", "freeing the communicators", WAITING):
        mesh.free()
