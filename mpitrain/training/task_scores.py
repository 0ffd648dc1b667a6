"""Tasks by which a run is judged at each validation (run.eval_tasks), in rows of its length."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import RankStatus
from mpitrain.comm.base.world import World
from mpitrain.config import Run
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import ConfigError
from mpitrain.evaluation.task_file import read_examples, with_shots
from mpitrain.evaluation.tasks import METRICS, TaskFile, samples
from mpitrain.evaluation.vocabulary import EvaluatedVocabulary
from mpitrain.inputs import shown
from mpitrain.plan.plan import Plan

if TYPE_CHECKING:
    from mpitrain.actor.actor import Actor

KEY = "run.eval_tasks"
Tasks = Mapping[str, TaskFile]  # by name


def require_tasks(run: Run) -> None:
    """Raise InputError for files of tasks that can't be read, before anything is prepared."""
    _names(run, ())
    for file in run.task_files:
        where = f"{KEY} {shown(file)}"
        with_shots(read_examples(file, where), run.eval_shots, where)


def read_tasks(plan: Plan, rundir: RunDir, tokenizer: Tokenizer, sources: Collection[str]) -> Tasks:
    """Return a run's tasks, which fit its rows. sources: validated, too. Raises InputError."""
    config = plan.run_config
    vocabulary = EvaluatedVocabulary.of_run(rundir, config.data, tokenizer, own=True)
    tasks = {
        name: TaskFile.read(file, KEY, config.run.eval_shots, vocabulary)
        for name, file in zip(_names(config.run, sources), config.run.task_files)
    }
    shortest = min(of_step.config.data.sequence for of_step in plan.growing or (plan,))
    for task in tasks.values():
        task.longest(shortest)  # raises for a choice that is longer
    return tasks


def _names(run: Run, sources: Collection[str]) -> list[str]:
    """Return the names of tasks, which differ from one another and from those of sources."""
    names = [Path(file).name.removesuffix(".jsonl") for file in run.task_files]
    counts = Counter([*names, *sources])
    for name in names:
        if counts[name] > 1:
            change = "rename a file: a task's name is its file's, without .jsonl"
            raise ConfigError(f"{KEY}: two tasks or sources are called {shown(name)}; {change}")
    return names


class TaskScores:
    """The tasks of a run, scored by its actor. tasks: on rank 0.

    stopping: whether this rank has to stop at once. stopped: one of them had to.
    samples: on rank 0, the first answers of each task when it was scored last.
    """

    def __init__(
        self, actor: "Actor", world: World, place: RankStatus, tasks: Tasks, stopping: Callable[[], bool]
    ):
        from mpitrain.evaluation.scorer import Scorer  # torch

        self._world = world
        self._place = place
        self._tasks = tasks
        self._scorer = Scorer(actor.plan, world, actor, stopping)
        self._context = actor.plan.config.data.sequence
        self.samples: dict[str, list[dict[str, Any]]] = {}
        self._num_tasks = len(actor.plan.run_config.run.task_files)

    @property
    def stopped(self) -> bool:
        return self._scorer.stopped

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each task, by its name, on all ranks; none if stopped. Collective."""
        found = {}
        tasks = list(self._tasks.items()) or [("", None)] * self._num_tasks
        for name, task in tasks:
            with self._place.at("validation", "scoring tasks"):
                result = self._scorer.answer(task.ask(self._context) if task else None)
            if self.stopped:
                return {}
            found[name] = {metric: result[metric] for metric in METRICS if metric in result}
            if task is not None:
                self.samples[name] = samples(result["answers"])
        return self._world.on_first_rank("scoring tasks", lambda: found)
