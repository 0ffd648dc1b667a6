"""Import the weights of a Hugging Face folder as a run's step 0, or as a step.

    RUN/config.toml                   the model's keys; the run that begins from here has them
    RUN/huggingface/                  config.json, the tokenizer and what else came along
    RUN/checkpoints/step-00000000/    the weights, in the type that the optimiser has them

A folder without config.toml is no run: what a killed import leaves, the next one replaces.
An import that fails removes all it has written, config.toml first.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain import config as settings
from mpitrain.checkpoint import save
from mpitrain.checkpoint.boxes import Box, Chunks, whole
from mpitrain.checkpoint.folders import find_one, name_of, remove_empty, step_of
from mpitrain.checkpoint.hdf5_bytes import STEP
from mpitrain.checkpoint.meta import StepInfo
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.cluster import code_identity
from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.team import Team
from mpitrain.config import LoadedConfig
from mpitrain.data.tokenizer import tokenizer_of
from mpitrain.errors import CheckpointError, ConfigError, InputError
from mpitrain.inputs import DRAFT, remove, shown
from mpitrain.origins import FOLDER, KeyOrigin
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.key_origins import with_resolved
from mpitrain.weights.beginning import TOKENIZER_KEY, no_tokenizer, texts_of_folder, with_texts
from mpitrain.weights.bits import NAME_OF
from mpitrain.weights.companions import companions_of_folder, length_of, with_tokenizer, write_companions
from mpitrain.weights.folder import TOKENIZER, ModelFolder
from mpitrain.weights.keys import ModelKeys, plan_on_one_rank, possible_keys_of, with_keys
from mpitrain.weights.matching import Matched, match
from mpitrain.weights.proof import digest_of_checkpoint
from mpitrain.weights.weight_source import FolderSource, bands, require_no_bias, require_tied_head

PART_BYTES = 1 << 26  # of a weight that is in memory at once
META = dict(step=0, tokens=0, updates=0, skipped=0, data="", loss_scale=(1.0, 0))


@dataclass(frozen=True)
class Target:
    """Where an import goes: the step's folder, and the run's, None for a step alone."""

    checkpoints: Path
    step: int
    run: RunDir | None


class FolderModel(NamedTuple):
    """What a folder holds, as a run of ours. asked: the configuration of the run to be."""

    asked: LoadedConfig
    plan: Plan
    read: ModelKeys
    matched: Matched


class Imported(NamedTuple):
    """What an import has made. companions: files that came along."""

    model: FolderModel
    target: Target
    companions: list[str]
    seconds: float


def read_model(team: Team, folder: ModelFolder, target: Target, overrides: tuple[str, ...]) -> FolderModel:
    """Return what a folder holds. Collective. Raises InputError for what can't be imported."""
    return team.on_every_rank("reading config.json", lambda: _understood(folder, target, overrides))


def import_weights(team: Team, folder: ModelFolder, model: FolderModel, target: Target) -> Imported:
    """Import a folder, a part by each rank. Collective. Raises InputError, and leaves nothing."""
    begin_s = time.monotonic()
    asked, plan, _, matched = model
    source = FolderSource(folder, matched, plan.config)
    team.on_every_rank("comparing the tied head", lambda: require_tied_head(matched, source))
    where_from = shown(folder.path)
    team.on_every_rank("reading biases", lambda: require_no_bias(source, plan, where_from))
    total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in plan.stored_weights().values())
    made = team.on_first_rank("making the folder", lambda: _begin(target, total))
    tmp = target.checkpoints / (name_of(target.step) + ".tmp")
    mine = range(total * team.rank // team.size, total * (team.rank + 1) // team.size)
    try:
        with ProgressBar(f"importing {where_from}", total // team.size, team.rank) as progress:
            parts = _parts(plan, source, progress, mine)
            team.on_every_rank("writing weights", lambda: save.write_shard(tmp, team.rank, parts))
        came = team.on_first_rank(
            "committing the step", lambda: _commit(folder, target, tmp, asked, plan, team.size)
        )
    except InputError:
        team.on_first_rank("removing what was written", lambda: _undo(target, tmp, made))
        raise
    return Imported(model, target, came, time.monotonic() - begin_s)


def target_of(given: str) -> Target:
    """Return what --to means. Raises CheckpointError if something is there that an import would replace."""
    path = Path(given)
    step = step_of(path.absolute())
    if step is not None:
        if os.path.lexists(path):
            raise CheckpointError(f"{shown(given)} already exists; give another step")
        return Target(path.absolute().parent, step, None)
    run = RunDir(given)
    try:
        names = set(os.listdir(path))
    except FileNotFoundError:
        names = set()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no folder can have this name"
        raise CheckpointError(f"{shown(given)}: {why}; give a new run directory") from None
    drafts = {run.checkpoints.name, run.came_along.name, run.config.name + DRAFT}
    if others := names - drafts:
        has = f"{shown(given)} has something in it ({shown(min(others))})"
        raise CheckpointError(f"{has}; give a run directory to be made")
    return Target(run.checkpoints, 0, run)


def _understood(folder: ModelFolder, where: Target, overrides: tuple[str, ...]) -> FolderModel:
    keys = possible_keys_of(folder)
    run = f"run.dir={shown(where.run.path)}" if where.run else "run.dir=imported"
    given = settings.read(None, (run, *overrides))
    asked = with_keys(given, keys.keys, keys.where)
    if not given.origins.is_given("precision.compute"):
        compute = _compute_of(folder)
        asked = asked.with_values({"precision.compute": compute}, KeyOrigin(FOLDER, shown(folder.path)))
        keys.lines.append(f'precision.compute = "{compute}"  (dtype of the tensors)')
    if where.run:
        asked = _with_texts(asked, folder, where.run, keys.lines)
    plan = plan_on_one_rank(asked.config)
    rows = plan.config.model.vocab - plan.config.model.padding
    if rows != keys.vocab:
        what = f"model.vocab = {rows}, but {keys.where} has {keys.vocab}: rows for further tokens"
        change = "leave it out, and run with model.init and model.vocab"
        raise ConfigError(f"{what} are made where a run begins; {change}")
    return FolderModel(asked, plan, keys, match(folder, plan, keys))


def _with_texts(asked: LoadedConfig, folder: ModelFolder, run: RunDir, lines: list[str]) -> LoadedConfig:
    texts = texts_of_folder(folder)
    if texts[TOKENIZER_KEY]:
        texts[TOKENIZER_KEY] = str(run.came_along / TOKENIZER)
    begun, more = with_texts(asked, texts, shown(folder.path))
    lines += more
    if begun.config.data.tokenizer == "":
        lines.append(f"no tokenizer: {no_tokenizer(folder.path)}")
    length = length_of(folder.config)
    if begun.config.data.sequence < length:
        lines.append(f"the model reads up to {length:,} tokens, of which data.sequence are trained on")
    return begun


def _compute_of(folder: ModelFolder) -> str:
    """Return the precision that most of a folder's numbers are stored in."""
    sizes = Counter[str]()
    for name in folder.names:
        entry = folder.entry(name)
        sizes[entry.code] += entry.num_bytes
    return NAME_OF.get(max(sizes, key=sizes.__getitem__), "fp32")


def _begin(where: Target, num_bytes: int) -> list[Path]:
    """Make the step's folder; return the folders that were made for it, the innermost first."""
    made = [path for path in (where.checkpoints, *where.checkpoints.parents) if not path.exists()]
    if where.run is not None and (old := find_one(where.checkpoints, where.step)) is not None:
        remove(old, STEP)  # without config.toml beside it: an import that was killed
    try:
        save.begin(where.checkpoints, where.step, num_bytes)
    except CheckpointError:
        remove_empty(made)
        raise
    return made


def _undo(where: Target, tmp: Path, made: list[Path]) -> None:
    """Remove what was written. What can't be removed is no run without its config.toml."""
    own = [(tmp, STEP)]
    if where.run is not None:
        own = [(where.run.config, 1), *own, (tmp.with_suffix(""), STEP), (where.run.came_along, 1)]
    with suppress(OSError):  # the error of the import is the one to report
        for path, names in own:
            remove(path, names)
    remove_empty(made)


def _parts(
    plan: Plan, source: FolderSource, progress: ProgressBar, mine: range
) -> Mapping[str, list[tuple[object, save.Extent]]]:
    """Return what this rank writes: boxes whose first byte of all is among its own."""
    parts: dict[str, list[tuple[object, save.Extent]]] = {}
    at = 0
    for spec, (name, (dtype, shape)) in zip(plan.parameters(), plan.stored_weights().items()):
        row_bytes = dtype.itemsize * math.prod(shape[1:])
        for box in bands(whole(shape), row_bytes, Chunks(shape, dtype.itemsize).rows, PART_BYTES):
            if at in mine:
                part = save.LaterPart(box, dtype, partial(_made, spec, source, progress))
                parts.setdefault(name, []).append((part, save.Extent(shape, box.start)))
            at += box.size * dtype.itemsize
    return parts


def _made(spec: Spec, source: FolderSource, progress: ProgressBar, box: Box, dtype: np.dtype) -> np.ndarray:
    """Return a part of a weight; of one that isn't in the folder, its constant."""
    there = source.box(spec.name)
    if there is None:
        return np.full(box.shape, spec.constant, dtype)
    values = np.zeros(box.shape, dtype)  # rows that pad the vocabulary stay so
    both = box.overlap(there)
    if both.size:
        source.read(spec.name, both, values[both.seen_from(box)])
    progress.add(values.nbytes)
    return values


def _commit(
    folder: ModelFolder, where: Target, tmp: Path, asked: LoadedConfig, plan: Plan, num_shards: int
) -> list[str]:
    files: dict[str, bytes] = {}
    if where.run is not None:
        remove(where.run.came_along)  # of an import that was killed
        files = companions_of_folder(folder)
        if asked.origins.is_given(TOKENIZER_KEY):
            data = asked.config.data
            files = with_tokenizer(files, tokenizer_of(data), data.tokenizer)
        write_companions(files, where.run.came_along)
    writer = {"imported": str(folder.path), "shards": num_shards, **code_identity.code()}
    about = StepInfo(settings.to_toml(plan.config), writer)
    save.commit(tmp, META | {"step": where.step}, num_shards, about=about)
    if where.run is not None:
        where.run.begin(asked, with_resolved(asked, plan.config))
    return list(files)


def digest_line(matched: Matched, where: Target) -> str:
    """Say the digest of what was written; the step is whole without it."""
    try:
        with Checkpoint(where.checkpoints / name_of(where.step)) as saved:
            digest = digest_of_checkpoint(saved, [weight.name for weight in matched.weights])
    except (InputError, OSError) as error:
        return f"warning: the digest of the weights can't be computed: {shown(error)}"
    return f"digest of the weights {digest}"
