"""Export a step as a Hugging Face folder, proved before it has its name.

OUT.export.tmp/     being written; a killed export leaves it, the next one replaces it
OUT/                whole, read back and compared
    config.json  generation_config.json  README.md  tokenizer.json ...
    model.safetensors, or shards with model.safetensors.index.json
"""

import os
import re
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpitrain import config as settings
from mpitrain.checkpoint.dtypes import NAMES
from mpitrain.checkpoint.files import require_space
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.steps import same_everywhere, steps_at
from mpitrain.cluster.heap import keep_freed_memory
from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.cluster.rundir import RunDir, run_that_has
from mpitrain.cluster.team import Team
from mpitrain.config import Config
from mpitrain.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    MpitrainError,
    WeightsError,
    counted,
    on_all_ranks,
)
from mpitrain.inputs import os_errors_as, remove, shown, sync_folder
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.plan import Plan
from mpitrain.weights import logits
from mpitrain.weights.beginning import run_of
from mpitrain.weights.bits import NAMED
from mpitrain.weights.card import card
from mpitrain.weights.companions import as_json, companions_of_run, exported, special_tokens
from mpitrain.weights.expected import ExpectedDigests, ExportDigests, together
from mpitrain.weights.folder import CONFIG, INDEX, ModelFolder
from mpitrain.weights.keys import config_json, plan_on_one_rank
from mpitrain.weights.matching import FURTHER, Matched, Weight, tensors_of, weights_of, zeros_of
from mpitrain.weights.proof import ExportError, digest_of, opened, read_back
from mpitrain.weights.syncing import Syncing
from mpitrain.weights.weight_source import FolderSource
from mpitrain.weights.writing import OutTensor, new_file, shards_of, tensors_to_write, write_all, write_shard

T = TypeVar("T")
Rows = list[tuple[str, str]]  # of the table of the proof
TMP = ".export.tmp"
FREE_SPACE = "free some space, or give another folder"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class ExportOptions:
    """What the command line said. prove: None for a small model, where transformers is installed."""

    step: int | str | None = None
    dtype: str | None = None
    shard_size: str = "5GB"
    prove: bool | None = None


class ExportSource(NamedTuple):
    """A step, the run directory it lies in, and the files that belong to it, by name."""

    saved: Checkpoint
    config: Config
    plan: Plan
    run: RunDir | None
    companions: dict[str, bytes]


class ExportPlan(NamedTuple):
    """What is written: the folder, its weights, its files with their tensors, and their dtype."""

    source: ExportSource
    path: Path
    weights: list[Weight]
    shards: dict[str, list[OutTensor]]
    dtype: str
    prove: bool | None

    @property
    def tensors(self) -> list[OutTensor]:
        return [tensor for group in self.shards.values() for tensor in group]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


class Exported(NamedTuple):
    """A step that was exported. rows: the table of the proof. warning: what a crash may lose now."""

    step: int
    rows: Rows
    warning: str
    left_out: list[str]  # names of weights for further tokens


def export(team: Team, given: str, target: str, options: ExportOptions) -> Exported:
    """Export a step; each rank writes and reads back a part of it. Collective. Rank 0 has the proof.

    Raises InputError, and leaves nothing, for what can't be exported; ExportError, with what was
    written beside the target, if it isn't what was to be.
    """
    begin_s = time.monotonic()
    keep_freed_memory()  # or each of thousands of bands has the kernel clear its pages anew
    if options.prove:
        team.on_first_rank("looking for transformers", logits.require_installed)
    most_bytes = team.on_every_rank("reading --shard-size", lambda: bytes_of(options.shard_size))
    steps = team.on_first_rank("finding the checkpoint", lambda: steps_at(given, options.step))
    with team.on_every_rank("opening the checkpoint", lambda: steps.open(steps.newest)) as saved:
        same_everywhere(team, saved)
        source = team.on_every_rank("reading its configuration", lambda: _source(saved))
        out = Path(target)
        written = team.on_every_rank("planning the files", lambda: _planned(source, out, options, most_bytes))
        team.on_first_rank("making the folder", lambda: _begin(out, written))
        with Syncing() as syncing:
            try:
                expected = _write_all(team, written, syncing)
                wrote_s = time.monotonic() - begin_s
                rows = _prove(team, written, expected)
                team.on_every_rank("syncing shards", lambda: _sync(written, syncing))
            except InputError:
                # a file that is open stays in a folder of NFS
                team.on_every_rank("closing shards", syncing.close)
                team.on_first_rank("removing what was written", lambda: _undo(written.path))
                raise
        warning = team.on_first_rank("giving it its name", lambda: _publish(written.path, out))
    total_s = time.monotonic() - begin_s
    rows.append(("time", f"{wrote_s:.1f} s to write, {total_s - wrote_s:.1f} s to sync and prove"))
    further = [spec.name for spec in source.plan.parameters() if spec.name.startswith(FURTHER)]
    return Exported(saved.step, rows, warning, further)


def bytes_of(text: str) -> int:
    """Return a size such as 5GB in bytes. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *([A-Za-z]*)", text.strip())
    size = int(float(match[1]) * UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise ConfigError(f"--shard-size {shown(text)}: needed a size such as 5GB or 500MB")
    return size


# ---------------------------------------------------------------- what is exported


def _source(saved: Checkpoint) -> ExportSource:
    try:
        tree = tomllib.loads(saved.about.config)
        if not tree:
            raise CheckpointError(f"{shown(saved.path)} doesn't say by which configuration it was written")
        plan = plan_on_one_rank(settings.with_values(settings.parse(tree), {"model.init": ""}))
    except ConfigError as error:
        raise ConfigError(f"{shown(saved.path)}: {shown(error.args[0])}") from None
    saved.require(plan.stored_weights())
    run = run_of(saved)
    return ExportSource(saved, plan.config, plan, run, companions_of_run(run) if run else {})


def _planned(source: ExportSource, out: Path, options: ExportOptions, most_bytes: int) -> ExportPlan:
    """Return what will be written. Raises InputError for a target that is there, or another model."""
    if os.path.lexists(out):
        raise WeightsError(f"{shown(out)} already exists; give the name of a new folder")
    if not out.name:
        raise WeightsError(f"{shown(out)} is no name; give the name of a new folder")
    if (run := run_that_has(out)) is not None:
        raise WeightsError(f"{shown(out)} belongs to the run in {shown(run)}; give another folder")
    compute = source.config.precision.compute
    dtype = options.dtype or ("bf16" if compute == "fp8" else compute)
    config_json(source.config, NAMED[dtype], {}, {})  # or there is no such model
    model = source.config.model
    vocab = model.vocab - (model.padding or 0)
    weights, zeros = weights_of(source.plan, vocab), zeros_of(source.plan, vocab)
    shards = shards_of(tensors_to_write(weights, zeros, source.saved, NAMED[dtype]), most_bytes)
    return ExportPlan(source, out.with_name(out.name + TMP), weights, shards, dtype, options.prove)


def _begin(out: Path, written: ExportPlan) -> None:
    with os_errors_as(WeightsError, shown(written.path), "give another folder"):
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        remove(written.path)
        require_space(out.absolute().parent, written.num_bytes)
        written.path.mkdir()


def _undo(path: Path) -> None:
    with suppress(OSError):  # the error of the export is the one to report; the next one removes it
        remove(path)


# ---------------------------------------------------------------- writing


def _write_all(team: Team, written: ExportPlan, syncing: Syncing) -> ExportDigests:
    """Write all files of the folder; return what they have to hold. Collective."""
    saved, config = written.source.saved, written.source.config
    expected = ExpectedDigests(saved)
    mine = list(written.shards.items())[team.rank :: team.size]

    def write_shards() -> None:
        for name, tensors in mine:
            path = written.path / name
            with os_errors_as(WeightsError, shown(path), FREE_SPACE):
                write_shard(path, tensors, saved, config, expected, syncing, progress.add)

    title = f"exporting step {saved.step}"
    with ProgressBar(title, written.num_bytes // team.size, team.rank) as progress:
        team.on_every_rank("writing shards", write_shards)
    team.on_first_rank("writing config.json", lambda: _write_others(written, syncing))
    return together(team.all_gather("what was written", expected.so_far))


def _write_others(written: ExportPlan, syncing: Syncing) -> None:
    saved, config, _, run, companions = written.source
    data = config.data
    tokens = special_tokens(run, companions, data)
    described = config_json(config, NAMED[written.dtype], tokens.kept, tokens.own)
    files = {CONFIG: as_json(described), **exported(companions, described, tokens.replaced, data)}
    if len(written.shards) > 1:
        files[INDEX] = as_json(_index(written))
    parameters = sum(weight.spec.numel for weight in written.weights)
    facts = {"parameters": f"{parameters:,}", "tensors": f"{len(written.tensors):,}"}
    digest = saved.meta.get("data")
    trained_on = f"{data.source} ({digest})" if digest else ""
    files["README.md"] = card(config, saved, written.dtype, facts, trained_on).encode()
    with os_errors_as(WeightsError, shown(written.path), "free some space"):
        for name, content in files.items():
            path = written.path / name
            path.parent.mkdir(exist_ok=True)
            with new_file(path, syncing, own=2 + name.count("/")) as file:
                write_all(file, content)


def _sync(written: ExportPlan, syncing: Syncing) -> None:
    """Wait until this rank's files are on the disk: most of it is done while they are read back."""
    try:
        syncing.wait()
        sync_folder(written.path)
    except OSError as error:
        where = error.filename or written.path
        raise WeightsError(f"{shown(where)}: {shown(error.strerror)}; {FREE_SPACE}") from None


def _index(written: ExportPlan) -> dict[str, Any]:
    where = {tensor.name: file for file, tensors in written.shards.items() for tensor in tensors}
    parameters = sum(weight.box.size for weight in written.weights)
    sizes = {"total_parameters": parameters, "total_size": written.num_bytes}
    return {"metadata": sizes, "weight_map": dict(sorted(where.items()))}


# ---------------------------------------------------------------- the proof


def _prove(team: Team, written: ExportPlan, expected: ExportDigests) -> Rows:
    """Read everything back, compare it, and return what to say of it. Raises ExportError. Collective."""
    failure, digests = _attempted(lambda: _read_share(team, written, expected), ExportDigests({}, 0.0))
    every = team.all_gather("what was read back", (failure, digests))
    _refuse([failed for failed, _ in every], written)
    read = together(digests for _, digests in every)
    read = read._replace(largest=max(read.largest, expected.largest))
    failure, rows = _attempted(lambda: _rows(written, read) if team.rank == 0 else [], [])
    _refuse(team.all_gather("whether the logits are the same", failure), written)
    return rows


def _attempted(action: Callable[[], T], otherwise: T) -> tuple[str, T]:
    """Return why an action failed, "" if it didn't, and its result; `otherwise` if it failed."""
    try:
        return "", action()
    except MpitrainError as error:
        return str(error.args[0]), otherwise


def _refuse(failures: Sequence[str], written: ExportPlan) -> None:
    """Raise ExportError, alike on all ranks, for the first of their failures."""
    if first := next(filter(None, failures), ""):
        what = f"the export isn't what it has to be: {first}"
        raise on_all_ranks(ExportError(f"{what}; it is left in {shown(written.path)}"))


def _read_share(team: Team, written: ExportPlan, expected: ExportDigests) -> ExportDigests:
    source = written.source
    folder, matched = opened(written.path, source.plan)
    mine = matched.weights[team.rank :: team.size]
    total = sum(weight.box.size for weight in mine) * itemsizes_of(source.config)[1]
    with folder, ProgressBar("reading it back", total, team.rank) as progress:
        there = FolderSource(folder, matched, source.config)
        return read_back(there, mine, source.saved, expected.digests, progress.add)


def _rows(written: ExportPlan, found: ExportDigests) -> Rows:
    source = written.source
    folder, matched = opened(written.path, source.plan)
    with folder:
        count = len(tensors_of((*matched.weights, *matched.zeros)))
        files = counted(len(written.shards), "files")
        saved_as = NAMES[source.saved.array(f"parameters/{matched.weights[0].name}").dtype]
        how = "as the checkpoint has them:" if saved_as == written.dtype else "cast from"
        parameters = sum(weight.box.size for weight in matched.weights)
        return [
            ("tensors", f"{count:,} used, {len(folder.names) - count} unused, in {files}"),
            ("parameters", f"{parameters:,}"),
            ("bytes", f"{written.num_bytes:,}, {written.dtype}, {how} {saved_as}"),
            ("digest", digest_of(matched.weights, source.saved, found.digests)),
            ("largest difference", f"{found.largest:.3g}" + " (the cast)" * bool(found.largest)),
            *_compared(folder, matched, written),
        ]


def _compared(folder: ModelFolder, matched: Matched, written: ExportPlan) -> Rows:
    if written.prove is False:
        return [("logits", "not compared (--no-prove)")]
    if written.prove is None:
        if not logits.is_installed():
            return [("logits", "not compared: transformers isn't installed")]
        if sum(weight.spec.numel for weight in matched.weights) > logits.MOST_ALONE:
            return [("logits", "not compared: a large model; --prove asks for it")]
    comparison = logits.compare(folder, matched, written.source.plan, NAMED[written.dtype])
    theirs = f"transformers {comparison.version}"
    difference = f"{comparison.largest:.2g} of {comparison.most:.3g}"
    rows = [("logits", f"as {theirs} has them, to {difference}, over {comparison.tokens} tokens")]
    if comparison.tokenizer:
        how = "load tokenizer.json by PreTrainedTokenizerFast.from_pretrained(FOLDER)"
        rows.append(("tokenizer", f"AutoTokenizer of {theirs} {shown(comparison.tokenizer)}; {how}"))
    return rows


def _publish(tmp: Path, out: Path) -> str:
    """Give the folder its name, by one rename; return a warning, or nothing."""
    exported_to = f"what was exported is in {shown(tmp)}"
    with os_errors_as(WeightsError, shown(out), exported_to):
        if os.path.lexists(out):
            raise WeightsError(f"{shown(out)} was made meanwhile; {exported_to}")
        os.rename(tmp, out)
    try:
        sync_folder(out.absolute().parent)
    except OSError as error:
        return f"warning: a crash of the machine may lose its name: {shown(error.strerror)}"
    return ""
