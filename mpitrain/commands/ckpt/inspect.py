"""`mpitrain ckpt inspect`: who wrote a checkpoint, what is in it, how healthy it is, for someone
who has only the folder.
"""

import math
import time
from collections.abc import Iterator
from json import dumps
from typing import Any

from mpitrain.checkpoint.dtypes import NAMES
from mpitrain.checkpoint.folders import leftovers
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.steps import Steps, steps_at
from mpitrain.checkpoint.verify import check_sizes
from mpitrain.data.corpus_files import named
from mpitrain.data.permutation import SORTED
from mpitrain.errors import DONE, FAILED, CheckpointError, ConfigError, counted
from mpitrain.inputs import as_argument, listed, shown
from mpitrain.plan.declared.formatting import aligned

MOST_SHOWN = 1000  # steps
MODEL = ("family", "layers", "width", "heads", "kv_heads", "ffn", "vocab", "tied")
# as cluster/code_identity.py calls them
CODE = "the code of mpitrain"
LIBRARIES = "the version of "


def inspect(path: str, step: int | None, arrays: bool, json: bool) -> tuple[str, int]:
    """Return what to print, and 0, or 1 if a step is damaged.

    Raises CheckpointError if there is none. Reads no arrays.
    """
    if arrays and json:
        raise ConfigError("--arrays does nothing with --json; leave one of them out")
    steps = steps_at(path, step)
    looked_at = steps.committed if json else steps.committed[-MOST_SHOWN:]
    facts_of_all = (_facts(steps, folder) for folder in looked_at)
    every = [facts for facts in facts_of_all if "damage" not in facts or not steps.gone(facts["step"])]
    code = FAILED if any("damage" in facts for facts in every) else DONE
    newest = next((facts for facts in reversed(every) if "damage" not in facts), None)
    if json:
        return dumps({"folder": str(steps.folder), "steps": every}, indent=1), code
    lines = list(_overview(steps, every))
    if newest is None:
        return "\n".join([*lines, "none of them can be used"]), code
    with steps.open(newest["step"]) as checkpoint:
        lines += ["", f"step {newest['step']}", *_story(checkpoint, newest)]
        lines += ["", aligned(list(_table(checkpoint)))] if arrays else []
    return "\n".join(lines), code


def _overview(steps: Steps, every: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines about all steps, and what lies beside them. every: facts of the shown ones."""
    num_bytes = sum(facts.get("bytes", 0) for facts in every)
    yield f"{shown(steps.folder)}: {counted(len(every), 'steps')}, {_size(num_bytes)}"
    yield aligned([("step", "saved at", "size", "shards", "val loss", "health"), *map(_row, every)])
    if len(steps.committed) > MOST_SHOWN:
        yield (
            f"  and {len(steps.committed) - MOST_SHOWN:,} earlier ones; --json prints all, --step one of them"
        )
    if left := leftovers(steps.folder):
        yield (
            "  beside them, being written or removed, or left by a killed run: "
            f"{listed([path.name for path in left])}"
        )


def _facts(steps: Steps, step: int) -> dict[str, Any]:
    """Return what is known without reading arrays; what is wrong, if something is, in `damage`."""
    try:
        with steps.open(step) as checkpoint:
            check_sizes(checkpoint)
            arrays = [checkpoint.array(name) for name in checkpoint.names()]
            modified = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(checkpoint.path.stat().st_mtime))
            return {
                "step": step,
                "time": str(checkpoint.about.writer.get("time", modified)),
                "bytes": sum(checkpoint.shards.values()),
                "shards": len(checkpoint.shards),
                "arrays": len(arrays),
                "numbers": sum(math.prod(array.shape) for array in arrays),
                "digest": checkpoint.digest,
                "meta": checkpoint.meta,
                "writer": dict(checkpoint.about.writer),
            }
    except CheckpointError as error:
        return {"step": step, "damage": error.args[0]}


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    if "damage" in facts:
        return str(facts["step"]), "", "", "", "", f"damaged: {shown(facts['damage'])}"
    loss = facts["meta"].get("val_loss")
    cells = str(facts["step"]), shown(facts["time"]), _size(facts["bytes"]), str(facts["shards"])
    return *cells, "" if loss is None else f"{loss:.4f}", "index and sizes are intact"


def _story(checkpoint: Checkpoint, facts: dict[str, Any]) -> Iterator[str]:
    meta = checkpoint.meta
    writer = checkpoint.about.writer
    settings = checkpoint.about.settings
    if writer:
        known = {
            key: shown(writer.get(key, "?"))
            for key in ("user", "host", "time", "MPI", "ranks", "nodes", "layout", CODE)
        }
        versions = [
            f"{shown(name.removeprefix(LIBRARIES))} {shown(value)}"
            for name, value in writer.items()
            if name.startswith(LIBRARIES)
        ]
        yield f"  written by    {known['user']} on {known['host']}, {known['time']}"
        yield f"  with          code {known[CODE]}, {', '.join(versions)}, {known['MPI']}"
        ranks, nodes = (_counted(known[key], key) for key in ("ranks", "nodes"))
        yield f"  layout        {ranks} on {nodes}, {known['layout']}"
    else:
        yield "  written by    unknown: version 1 of the format, or not by a run"
    model = {key: settings.get(f"model.{key}") for key in MODEL}
    if sizes := [f"{key} {shown(value)}" for key, value in model.items() if value not in (None, "", 0)]:
        yield f"  model         {', '.join(sizes)}"
    if "data.source" in settings:
        data = f"{shown(settings['data.source'])} {named(settings.get('data.path', ''))}".rstrip()
        order = shown(meta.get("order") or SORTED)
        yield f"  data          {data}, digest {shown(meta['data'])}, order {order}"
    position = f", {counted(meta['sequences'], 'sequences', ',')}" if "sequences" in meta else ""
    updates = counted(meta["updates"], "updates", ",")
    counts = f"{counted(meta['tokens'], 'tokens', ',')}; {updates}, {meta['skipped']:,} skipped"
    yield f"  trained       {counted(meta['step'], 'steps', ',')}{position}, {counts}"
    for what, (count, numbers, num_bytes, dtypes) in _groups(checkpoint).items():
        sizes = f"{counted(count, 'arrays')}, {numbers / 1e6:.2f} M numbers, {_size(num_bytes)}"
        yield f"  {shown(what):13} {sizes}, {', '.join(sorted(dtypes))}"
    yield f"  root digest   {facts['digest']}"
    yield f"  to verify     mpitrain ckpt verify {as_argument(checkpoint.path)}"


def _counted(number: str, nouns: str) -> str:
    """Return a number of a writer, which is text and may be unknown, with its noun."""
    return counted(int(number), nouns) if number.isascii() and number.isdigit() else f"{number} {nouns}"


def _groups(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int, set[str]]]:
    """Return of parameters, and of each moment: arrays, numbers, bytes and dtypes."""
    groups: dict[str, tuple[int, int, int, set[str]]] = {}
    for array in map(checkpoint.array, checkpoint.names()):
        what = "parameters" if array.name.startswith("parameters/") else "/".join(array.name.split("/")[:2])
        count, numbers, num_bytes, dtypes = groups.get(what, (0, 0, 0, set()))
        here = math.prod(array.shape)
        num_bytes += here * array.dtype.itemsize
        groups[what] = count + 1, numbers + here, num_bytes, dtypes | {NAMES[array.dtype]}
    return groups


def _table(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    yield "array", "dtype", "shape", "pieces", "chunks"
    for array in map(checkpoint.array, checkpoint.names()):
        shape = " x ".join(map(str, array.shape)) or "one number"
        yield array.name, NAMES[array.dtype], shape, str(len(array.pieces)), str(array.chunks.count)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
