"""model.init: the model and the first weights of a run, of a folder or a checkpoint.

A run that has a checkpoint of its own goes on from it, whatever became of model.init.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec

from mpitrain import config as settings
from mpitrain.checkpoint.folders import find, find_one, step_of
from mpitrain.checkpoint.load import open_step
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.config import Config, LoadedConfig
from mpitrain.errors import CheckpointError
from mpitrain.inputs import kind_of, listed, replacing, shown
from mpitrain.origins import FOLDER, KeyOrigin
from mpitrain.plan.plan import Plan
from mpitrain.weights.folder import CONFIG, TOKENIZER, ModelFolder, copied_companions
from mpitrain.weights.keys import OF_TRAINING, TABLES, filled, keys_of, require_model, with_keys
from mpitrain.weights.matching import FURTHER, match
from mpitrain.weights.weight_source import (
    CheckpointSource,
    FolderSource,
    WeightSource,
    missing,
    require_tied_head,
)

CHECKPOINTS = "checkpoints"
KEY = "model.init"


class Beginning(NamedTuple):
    """A configuration whose model is that of model.init, and what is to be said of it."""

    given: LoadedConfig
    lines: list[str]


def begins(given: LoadedConfig, before: Config | None = None) -> Beginning:
    """Return a configuration with the keys that model.init says. Raises InputError.

    before: the resolved configuration of the run's own directory, if it has a checkpoint.
    """
    path = given.config.model.init
    if not path:
        return Beginning(given, [])
    if before is not None:
        given = with_keys(given, _keys_of(before), "the run")
        return Beginning(with_tokenizer(given, before.data.tokenizer, "the run"), [])
    if not is_folder_of_others(path):
        with opened_checkpoint(path) as saved:
            keys = _keys_of(_config_of(saved))
            given = with_keys(given, keys, shown(saved.path))
            return Beginning(given, [f"{KEY}: the model of {shown(saved.path)}"])
    with ModelFolder(path) as folder:
        found = keys_of(folder)
        require_model(found, folder.where(CONFIG))
        given = filled(given, found, folder.where(CONFIG))
        lines = [f"{KEY}: {folder.where(CONFIG)}", *(f"  {line}" for line in found.lines)]
        if TOKENIZER in folder.companions:
            given = with_tokenizer(given, str(folder.path / TOKENIZER), shown(folder.path))
            lines.append(f"  data.tokenizer = {shown(given.config.data.tokenizer)}")
        return Beginning(given, lines)


def keep_companions(path: str, target: Path) -> None:
    """Copy what came along with the weights of a Hugging Face folder into a folder to be made."""
    if not is_folder_of_others(path):
        return

    def write(name: str, content: bytes) -> None:
        with replacing(target / name) as file:
            file.write(content)

    try:
        with ModelFolder(path) as folder:
            target.mkdir()
            copied_companions(folder, write)
    except OSError as error:
        raise CheckpointError(f"{shown(target)}: {shown(error)}; choose another run.dir") from None


def is_folder_of_others(path: str) -> bool:
    """Return whether a path is to be read as a Hugging Face folder, and not as a checkpoint."""
    where = Path(path)
    try:
        ours = step_of(where.absolute()) is not None or kind_of(where / CHECKPOINTS) == "a folder"
        return not ours or kind_of(where / CONFIG) is not None
    except (OSError, ValueError):
        return True


def opened_checkpoint(path: str) -> Checkpoint:
    """Open the step that a path means: of its folder, or the newest of a run directory."""
    where = Path(path).absolute()
    step = step_of(where)
    if step is not None:
        return open_step(where.parent, step)
    folder = where / CHECKPOINTS
    steps = list(find(folder))
    if not steps:
        raise CheckpointError(
            f"{shown(folder)}: no checkpoint yet; give a Hugging Face folder, or a run that has one"
        )
    return open_step(folder, steps[-1])


def _keys_of(config: Config) -> dict[str, object]:
    """Return what a resolved configuration says of its model."""
    found = {}
    for table in TABLES:
        for key, value in msgspec.to_builtins(getattr(config, table)).items():
            of_run = key in ("init", "preset") if table == "model" else key in OF_TRAINING
            if value is not None and value != "" and not (table != "attention" and of_run):
                found[f"{table}.{key}"] = value
    if not config.experts.count:
        found = {key: value for key, value in found.items() if not key.startswith("experts.")}
    found["model.vocab"] = config.model.vocab - (found.pop("model.padding", 0) or 0)
    if not getattr(config.model, "mtp", 0):
        found.pop("model.mtp", None)
        found.pop("model.mtp_weight", None)
    return found


def _config_of(saved: Checkpoint) -> Config:
    """Return the configuration that a step was written by, which may be a stranger's."""
    tables: dict[str, dict[str, object]] = {table: {} for table in TABLES}
    for name, value in saved.about.settings.items():
        table, _, key = name.partition(".")
        if table in tables:
            tables[table][key] = value
    if not tables["model"]:
        raise CheckpointError(f"{shown(saved.path)} doesn't say what model it is; give another step")
    tables["model"].pop("init", None)
    return settings.parse(tables)


def with_tokenizer(given: LoadedConfig, tokenizer: str, where: str) -> LoadedConfig:
    """Return a configuration with a model's tokenizer from `where`, unless the user gave one."""
    if given.origins.is_given("data.tokenizer"):
        return given
    return given.with_values({"data.tokenizer": tokenizer}, KeyOrigin(FOLDER, where))


def source_of(path: str, plan: Plan) -> WeightSource:
    """Open the weights of model.init for a plan's model. Raises InputError unless all fit.

    Reads headers alone. The caller closes it.
    """
    if not is_folder_of_others(path):
        return checkpoint_source(opened_checkpoint(path), plan)
    folder = ModelFolder(path)
    try:
        found = keys_of(folder)
        matched = match(folder, plan, found.kind, found.vocab, found.further)
        source = FolderSource(folder, matched, plan.config)
        require_tied_head(folder, matched, source)
    except BaseException:
        folder.close()
        raise
    return source


def checkpoint_source(saved: Checkpoint, plan: Plan) -> CheckpointSource:
    """Return the weights of a step for a plan's model. Raises CheckpointError unless they fit."""
    try:
        source = CheckpointSource(saved)
        specs = [spec for spec in plan.parameters() if not spec.name.startswith(FURTHER)]
        if lost := missing(source, [spec.name for spec in specs if spec.group != "load"]):
            raise CheckpointError(f"{shown(saved.path)} lacks {listed(lost, 4)}; it is of another model")
        for spec in plan.parameters():
            box = source.box(spec.name)
            # rows of tokens may be more or fewer: the vocabulary is padded, or has further tokens
            of_tokens = spec.group == "table" and spec.divided is not None
            of_tokens = of_tokens and box is not None and box.stop[1:] == spec.shape[1:]
            fits = box is None or box.stop == spec.shape or of_tokens
            if not fits:
                raise CheckpointError(
                    f"{shown(saved.path)}: {spec.name} is {list(box.stop)}, needed {list(spec.shape)}; it is "
                    "of another model"
                )
    except BaseException:
        saved.close()
        raise
    return source


def own_first_step(checkpoints: Path) -> bool:
    """Return whether a run's own folder has a step 0, which `mpitrain import` makes."""
    return find_one(checkpoints, 0) is not None


def has_steps(checkpoints: Path) -> bool:
    """Return whether a run has a checkpoint of its own, besides what it began with."""
    try:
        return any(step > 0 for step in find(checkpoints))
    except CheckpointError:  # is said later
        return False
