"""The checkpoint that a start makes, in memory of each node, of what an earlier one has copied there.

    1  every node says what it has: checkpoints of earlier starts, and parts of the state with steps
    2  all choose the newest step of which every part is on some node
    3  ranks compare the digests of its parts; without those that differ it is chosen anew
    4  ranks write the parts of their node as shards of a checkpoint, and send them to the others
    5  each node commits it, and removes the copies

A node that is new has nothing at first, and everything in the end.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.checkpoint import save
from mpitrain.checkpoint.dtypes import DTYPES
from mpitrain.checkpoint.folders import TMP, find, name_of, publish
from mpitrain.checkpoint.meta import StepInfo
from mpitrain.checkpoint.shards import file_name
from mpitrain.errors import CheckpointError, StorageError
from mpitrain.inputs import listed, open_regular, remove, shown
from mpitrain.training.saving.memory_folder import CopiedStart, NodeMemory, copied_starts, read_copy

PIECE = 1 << 24  # bytes of a file that are sent at once to each node


class NodeInventory(NamedTuple):
    """What a node has in memory. saved: checkpoints by step.

    shards: by the name of a start, how many parts its state has, and the steps of those that are here.
    """

    first: int
    ranks: list[int]
    saved: dict[int, Path]
    shards: dict[str, tuple[int, dict[int, set[int]]]]


class CopiedStep(NamedTuple):
    """A step that is in memory.

    start: that has copied it; "": it is a checkpoint already.
    holders: by the number of a shard, the node that has it, as an index; of a checkpoint one alone.
    lost: the newest step of a start of which nobody has some shards, and these.
    """

    step: int
    start: str
    holders: dict[int, int]
    lost: tuple[int, list[int]] | None = None


def save_copied_step(memory: NodeMemory, saved_step: int) -> list[str]:
    """Make a checkpoint on each node of the newest step in memory, if it is later than `saved_step`.

    Return what is to be said. Collective over all ranks; raises InputError alike on all.
    """
    world = memory.world
    inventories = world.all_gather("looking into memory", _inventory(memory) if memory.leads else None)
    nodes = [inventory for inventory in inventories if inventory is not None]
    starts = copied_starts(memory.folders())
    said: list[str] = []
    newest = newest_in(nodes)
    while newest.start and newest.step > saved_step:
        damaged = _damaged(memory, nodes, newest, starts)
        if not damaged:
            _make_checkpoint(memory, nodes, newest, starts)
            break
        said += _leave_out(damaged, nodes, newest)
        newest = newest_in(nodes)
    if newest.step > saved_step and not newest.start:
        _complete_nodes(memory, nodes, newest)
    if newest.lost and newest.lost[0] > saved_step:
        step, shards = newest.lost
        parts = f"part{'s' * (len(shards) > 1)} {listed(shards, 4)} of the state"
        why = "the nodes that had it are gone, or it was changed"
        said.append(f"step {step} in memory lacks {parts}: {why}")
    return said


def _damaged(
    memory: NodeMemory, nodes: Sequence[NodeInventory], copied: CopiedStep, starts: Mapping[str, CopiedStart]
) -> list[int]:
    """Return the parts whose copies don't have the digest that they were made with. Collective."""
    mine = [
        number
        for number in _written_by(memory, nodes, copied)
        if not _is_whole(starts[copied.start].shards[number][0], number, copied.step)
    ]
    of_ranks = memory.world.all_gather("comparing the digests of copies", mine)
    return sorted(number for numbers in of_ranks for number in numbers)


def _is_whole(folder: Path, number: int, step: int) -> bool:
    with suppress(CheckpointError):
        _, copies = read_copy(folder, number)
        generation = copies.generation_of(step)
        return generation is not None and copies.digest(generation) == copies.marked_digest(generation)
    return False


def _leave_out(damaged: Sequence[int], nodes: Sequence[NodeInventory], copied: CopiedStep) -> list[str]:
    """Take damaged copies out of what nodes have; return what is said of them."""
    said = []
    for number in damaged:
        node = nodes[copied.holders[number]]
        _, shards = node.shards[copied.start]
        shards[number].discard(copied.step)
        said.append(
            f"warning: part {number} of step {copied.step} in memory of the node of rank {node.first} has "
            "another digest than it was made with, by an error of memory or by a program that wrote there; "
            "this copy isn't used"
        )
    return said


def _written_by(memory: NodeMemory, nodes: Sequence[NodeInventory], copied: CopiedStep) -> list[int]:
    """Return the parts that this rank reads and writes: those of its node in turn."""
    return [
        number
        for number, index in copied.holders.items()
        if memory.world.rank == nodes[index].ranks[number % len(nodes[index].ranks)]
    ]


def newest_in(nodes: Sequence[NodeInventory]) -> CopiedStep:
    """Return the newest step that nodes have together; step 0: there is none."""
    saved = [CopiedStep(max(node.saved), "", {0: index}) for index, node in enumerate(nodes) if node.saved]
    starts = sorted({start for node in nodes for start in node.shards})
    copied = [_newest_of(start, nodes) for start in starts]
    newest = max([*saved, *copied], key=lambda step: step.step, default=CopiedStep(0, "", {}))
    lost = max((step.lost for step in copied if step.lost), default=None)
    return newest._replace(lost=lost) if lost and lost[0] > newest.step else newest


def _newest_of(start: str, nodes: Sequence[NodeInventory]) -> CopiedStep:
    """Return the newest step that a start has copied whole; the one before that under way."""
    held = [(index, *node.shards[start]) for index, node in enumerate(nodes) if start in node.shards]
    num_shards = held[0][1]
    seen = {step for _, _, shards in held for steps in shards.values() for step in steps}
    for step in sorted(seen, reverse=True):
        holders = {
            number: index
            for index, _, shards in reversed(held)
            for number, steps in shards.items()
            if step in steps
        }
        if len(holders) == num_shards:
            return CopiedStep(step, start, holders)
    newest = max(seen, default=0)
    there = {number for _, _, shards in held for number, steps in shards.items() if newest in steps}
    return CopiedStep(0, start, {}, (newest, sorted(set(range(num_shards)) - there)))


def _inventory(memory: NodeMemory) -> NodeInventory:
    folders = memory.folders()
    saved: dict[int, Path] = {}
    for folder in folders:
        with suppress(CheckpointError):
            saved |= find(folder)
    shards = {
        name: (start.num_shards, {number: steps for number, (_, steps) in start.shards.items()})
        for name, start in copied_starts(folders).items()
    }
    return NodeInventory(memory.first, memory.ranks, saved, shards)


@contextmanager
def _making(memory: NodeMemory, step: int) -> Iterator[Path]:
    """Give the temporary folder of a step on this node; an error removes it. Collective."""
    tmp = memory.own_folder / f"{name_of(step)}{TMP}"
    try:
        yield tmp
    except (CheckpointError, StorageError):  # memory was short, for example
        memory.on_each_node("removing what was written", lambda: remove(tmp))
        raise


def _make_checkpoint(
    memory: NodeMemory, nodes: Sequence[NodeInventory], copied: CopiedStep, starts: Mapping[str, CopiedStart]
) -> None:
    """Write the shards that this rank is to write, send them to other nodes, and commit the step."""
    mine = _written_by(memory, nodes, copied)

    def begin() -> None:
        if copied.start in starts:  # else this node is new
            _make_room(starts[copied.start], copied.step)
        save.begin(memory.own_folder, copied.step)

    def write() -> None:
        for number in mine:
            save.write_shard(tmp, number, _parts(starts[copied.start].shards[number][0], number, copied.step))

    with _making(memory, copied.step) as tmp:
        memory.on_each_node("making a folder in memory", begin)
        memory.world.on_every_rank("writing what was copied", write)
        to_others = [node.first for node in nodes if node.first != memory.first]
        _send(memory, tmp, (tmp / file_name(number) for number in mine), to_others)
        meta, about = _meta_of(memory, starts, copied, mine)
        memory.on_each_node(
            "committing what was copied", lambda: save.commit(tmp, meta, len(copied.holders), about=about)
        )
    memory.on_each_node("removing what was copied", memory.remove_copies)


def _make_room(start: CopiedStart, step: int) -> None:
    """Drop all copies of this node but those of a step: a checkpoint takes as much."""
    for number, (folder, steps) in start.shards.items():
        if step in steps:
            _, copies = read_copy(folder, number)
            copies.drop_others(copies.generation_of(step))


def _meta_of(
    memory: NodeMemory, starts: Mapping[str, CopiedStart], copied: CopiedStep, mine: Sequence[int]
) -> tuple[dict, StepInfo]:
    """Return what the step says besides arrays, of the rank that writes its first shard."""

    def read() -> tuple[dict, str, dict] | None:
        if 0 not in mine:
            return None
        manifest, copies = read_copy(starts[copied.start].shards[0][0], 0)
        return copies.meta(copies.generation_of(copied.step)), manifest.config, manifest.writer

    what = "reading what was copied"
    metas = memory.world.all_gather(what, memory.world.on_every_rank(what, read))
    meta, config, writer = next(filter(None, metas))
    return meta, StepInfo(config, writer)


def _complete_nodes(memory: NodeMemory, nodes: Sequence[NodeInventory], copied: CopiedStep) -> None:
    """Send a checkpoint that an earlier start has made to the nodes that haven't got it."""
    (holder,) = copied.holders.values()
    lacking = [node.first for node in nodes if copied.step not in node.saved]
    lacks = memory.first in lacking
    sends = memory.leads and memory.first == nodes[holder].first
    files = _files_in(nodes[holder].saved[copied.step]) if sends else ()
    with _making(memory, copied.step) as tmp:
        memory.on_each_node(
            "making a folder in memory", lambda: lacks and save.begin(memory.own_folder, copied.step)
        )
        _send(memory, tmp, files, lacking)
        memory.on_each_node("committing what was copied", lambda: lacks and publish(tmp))


def _files_in(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.iterdir() if path.is_file())


def _send(memory: NodeMemory, folder: Path, files: Iterable[Path], receivers: Sequence[int]) -> None:
    """Send files to the folder of other nodes, piece by piece. Collective over all ranks."""
    world = memory.world
    pieces = _pieces(files if receivers else ())
    while True:
        piece = world.on_every_rank("reading what is in memory", lambda: next(pieces, None))
        if not any(world.all_gather("what is sent from memory", piece is not None)):
            return
        sent = [piece if rank in receivers else None for rank in range(world.size)]
        received = world.all_to_all("sending what is in memory", sent)
        world.on_every_rank("writing what was sent", partial(_append, folder, received))


def _pieces(files: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for path in files:
        with open(open_regular(path), "rb") as file:
            while piece := file.read(PIECE):
                yield path.name, piece


def _append(folder: Path, pieces: Sequence[tuple[str, bytes] | None]) -> None:
    for name, piece in filter(None, pieces):
        with open(open_regular(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(piece)


def _parts(folder: Path, number: int, step: int) -> dict[str, list[tuple[np.ndarray, save.Extent]]]:
    """Return what a shard holds, in its memory. Raises CheckpointError."""
    manifest, copies = read_copy(folder, number)
    generation = copies.generation_of(step)
    assert generation is not None, "its digest was compared"
    parts = defaultdict(list)
    try:
        for part in manifest.parts:
            array = copies.array(generation, part.at, DTYPES[part.dtype], part.shape)
            parts[part.name].append((array, save.Extent(tuple(part.whole), tuple(part.offset))))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{shown(folder)}: shard {number} of copies can't be read: {error}") from None
    return parts
