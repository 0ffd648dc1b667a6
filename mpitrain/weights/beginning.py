"""model.init: the model and the first weights of a run, of a folder or a checkpoint.

A run that has a checkpoint of its own resumes from it, whatever became of model.init.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain import config as settings
from mpitrain.checkpoint.folders import find, find_one, step_of
from mpitrain.checkpoint.load import open_step
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.cluster.rundir import RunDir
from mpitrain.config import Config, LoadedConfig, as_override
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.inputs import closed_on_error, is_there, kind_of, listed, shown
from mpitrain.origins import FOLDER, KeyOrigin
from mpitrain.plan.plan import Plan
from mpitrain.weights.companions import (
    BYTES,
    Files,
    companions_of_folder,
    companions_of_run,
    length_of,
    tokenizer_of_run,
    with_length,
    with_tokenizer,
    write_companions,
)
from mpitrain.weights.folder import CONFIG, TOKENIZER, ModelFolder
from mpitrain.weights.keys import OF_TRAINING, TABLES, keys_of, possible_keys_of, with_keys
from mpitrain.weights.matching import BIAS, FURTHER, match
from mpitrain.weights.weight_source import (
    CheckpointSource,
    FolderSource,
    WeightSource,
    require_no_bias,
    require_tied_head,
)

CHECKPOINTS = "checkpoints"
KEY = "model.init"
TOKENIZER_KEY, END_KEY, BEGIN_KEY = "data.tokenizer", "data.end_of_text", "data.begin_of_text"
SEQUENCE_KEY = "data.sequence"
OF_TEXTS = (TOKENIZER_KEY, END_KEY, BEGIN_KEY, SEQUENCE_KEY)
# tokens trained on by default: models read up to a million, which no memory holds
MOST_SEQUENCE = 2048
# without a tokenizer.json the rules that cut a text into words are code of transformers
OLDER_TOKENIZERS = [
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "vocab.txt",
    "tiktoken.model",
]


class Beginning(NamedTuple):
    """A configuration whose model is that of model.init, and what is to be said of it."""

    given: LoadedConfig
    lines: list[str]


def with_origin_of_run(given: LoadedConfig, before: LoadedConfig) -> Beginning:
    """Return a configuration with the model.init that the run in its directory began with.

    before: of the run directory. Raises ConfigError if another one is given: nobody would read it.
    """
    recorded = before.config.model.init
    asked = given.config.model.init
    if not asked:
        given = given.with_values({KEY: recorded}, before.origins.of(KEY))
    elif asked != recorded and os.path.realpath(asked) != os.path.realpath(recorded):
        began = f"began with {shown(recorded)}" if recorded else "began with its own weights"
        raise ConfigError(
            f"{KEY} = {shown(asked)}: run.dir = {shown(given.config.run.dir)} holds a run that {began}, and "
            f"is resumed from its own checkpoint; choose another run.dir, or leave {KEY} out"
        )
    gone = bool(recorded) and not is_there(recorded)
    said = f"{KEY} = {shown(recorded)} no longer exists; the run doesn't need it any more"
    return Beginning(given, [said] * gone)


def begins(given: LoadedConfig, before: Config | None = None) -> Beginning:
    """Return a configuration with the keys that model.init says. Raises InputError.

    before: the resolved configuration of the run's own directory, if it has a checkpoint.
    """
    path = given.config.model.init
    if not path:
        return Beginning(given, [])
    if before is not None:
        given = with_keys(given, _keys_of(before), "the run")
        return Beginning(with_texts(given, _set_keys(settings.flatten(before)), "the run").given, [])
    if not is_folder_of_others(path):
        with opened_checkpoint(path) as saved:
            given = with_keys(given, _keys_of(_config_of(saved)), shown(saved.path))
            lines = [f"{KEY}: the model of {shown(saved.path)}"]
            return _begun(given, _texts_of(saved), saved.path, lines)
    with ModelFolder(path) as folder:
        keys = possible_keys_of(folder)
        given = with_keys(given, keys.keys, keys.where)
        lines = [f"{KEY}: {keys.where}", *(f"  {line}" for line in keys.lines)]
        return _begun(given, texts_of_folder(folder), folder.path, lines)


def companions_of(path: str) -> Files:
    """Return what belongs to the weights of model.init. Raises InputError."""
    if is_folder_of_others(path):
        with ModelFolder(path) as folder:
            return companions_of_folder(folder)
    with opened_checkpoint(path) as saved:
        length = saved.about.settings.get("data.sequence")
        run = run_of(saved)
    files = companions_of_run(run) if run else {}
    return with_length(files, length) if isinstance(length, int) else files


def keep_companions(init: str, tokenizer: Tokenizer, file: str, target: Path) -> None:
    """Write a model's companions into a run's folder. init: model.init. file: data.tokenizer."""
    files = with_tokenizer(companions_of(init) if init else {}, tokenizer, file)
    if set(files) - {TOKENIZER}:  # that alone is kept with the tokens
        write_companions(files, target)


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
        instead = "give a Hugging Face folder, or a run that has one"
        raise CheckpointError(f"{shown(folder)}: no checkpoint yet; {instead}")
    return open_step(folder, steps[-1])


def _keys_of(config: Config) -> dict[str, object]:
    of_run = {"model.init", "model.preset", "model.padding", *(f"experts.{key}" for key in OF_TRAINING)}
    if not config.model.mtp:
        of_run |= {"model.mtp", "model.mtp_weight"}
    tables = TABLES if config.experts.count else ("model", "attention")
    keys = {
        key: value
        for key, value in settings.flatten(config).items()
        if key.partition(".")[0] in tables and key not in of_run and value is not None and value != ""
    }
    return keys | {"model.vocab": config.model.vocab - (config.model.padding or 0)}


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


def texts_of_folder(folder: ModelFolder) -> dict[str, object]:
    """Return the keys of the texts of a folder's model. A tokenizer of "": there is none."""
    tokenizer = str(folder.path / TOKENIZER) if TOKENIZER in folder.companions else ""
    length = length_of(folder.config)
    return {TOKENIZER_KEY: tokenizer} | ({SEQUENCE_KEY: min(length, MOST_SEQUENCE)} if length else {})


def _texts_of(saved: Checkpoint) -> dict[str, object]:
    """Return the keys by which the run of a step reads its texts. "": its tokenizer is gone."""
    keys = _set_keys(saved.about.settings)
    if keys.setdefault(TOKENIZER_KEY, BYTES) != BYTES:
        run = run_of(saved)
        keys[TOKENIZER_KEY] = str((run and tokenizer_of_run(run)) or "")
    return keys


def _set_keys(values: Mapping[str, object]) -> dict[str, object]:
    return {key: values[key] for key in OF_TEXTS if values.get(key) is not None}


def run_of(saved: Checkpoint) -> RunDir | None:
    """Return the run directory that a step lies in, if it does."""
    checkpoints = saved.path.parent
    return RunDir(checkpoints.parent) if checkpoints.name == CHECKPOINTS else None


def with_texts(given: LoadedConfig, texts: Mapping[str, object], where: str) -> Beginning:
    """Return a configuration with a model's keys for texts, from `where`, that were left open."""
    is_given = given.origins.is_given
    # the names of another tokenizer's tokens are others
    asked = {SEQUENCE_KEY} if is_given(TOKENIZER_KEY) else texts.keys()
    new = {key: value for key, value in texts.items() if key in asked and not is_given(key)}
    lines = [f"{key} = {shown(value)}" for key, value in new.items() if value != ""]
    return Beginning(given.with_values(new, KeyOrigin(FOLDER, where)), lines)


def _begun(given: LoadedConfig, texts: Mapping[str, object], path: Path, lines: list[str]) -> Beginning:
    begun, more = with_texts(given, texts, shown(path))
    if begun.config.data.tokenizer == "":
        raise DataError(no_tokenizer(path))
    return Beginning(begun, [*lines, *(f"  {line}" for line in more)])


def no_tokenizer(path: Path) -> str:
    """Return what to say of weights in a folder without a tokenizer that is read."""
    older = [name for name in OLDER_TOKENIZERS if is_there(path / name)]
    if not older:
        return (
            f"{shown(path)}: no {TOKENIZER}, and tokens of another tokenizer mean nothing to this model; "
            "give its own, --set data.tokenizer=FILE, or --set data.tokenizer=bytes for a model of bytes"
        )
    to = f"{path.absolute().name}-tokenizer"
    load = f"AutoTokenizer.from_pretrained({str(path)!r})"
    code = f"from transformers import AutoTokenizer; {load}.save_pretrained({to!r})"
    key = as_override(TOKENIZER_KEY, f"{to}/{TOKENIZER}")
    what = f"{shown(path)}: no {TOKENIZER}, but {listed(older, 3)}, which isn't read here"
    return f"{what}; convert it by python -c {shlex.quote(code)}, and give --set {key}"


def source_of(path: str, plan: Plan) -> WeightSource:
    """Open the weights of model.init, headers alone. Raises InputError unless all fit the plan."""
    if not is_folder_of_others(path):
        return checkpoint_source(opened_checkpoint(path), plan)
    folder = ModelFolder(path)
    with closed_on_error(folder):
        matched = match(folder, plan, keys_of(folder))
        source = FolderSource(folder, matched, plan.config)
        require_tied_head(matched, source)
        require_no_bias(source, plan, shown(folder.path))
    return source


def checkpoint_source(saved: Checkpoint, plan: Plan) -> CheckpointSource:
    """Return the weights of a step for a plan's model. Raises CheckpointError unless they fit."""
    with closed_on_error(saved):
        source = CheckpointSource(saved)
        boxes = [(spec, source.box(spec.name)) for spec in plan.parameters()]
        lost = [spec for spec, box in boxes if box is None and spec.group not in ("load", BIAS)]
        if names := [spec.name for spec in lost if not spec.name.startswith(FURTHER)]:
            raise CheckpointError(f"{shown(saved.path)} lacks {listed(names, 4)}; it is of another model")
        for spec, box in boxes:
            # rows of tokens may be more or fewer: the vocabulary is padded, or has further tokens
            of_tokens = spec.group == "table" and spec.divided is not None
            first = 1 if of_tokens else 0
            if box is not None and box.stop[first:] != spec.shape[first:]:
                what = f"{spec.name} is {list(box.stop)}, needed {list(spec.shape)}"
                raise CheckpointError(f"{shown(saved.path)}: {what}; it is of another model")
        require_no_bias(source, plan, shown(saved.path))
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
