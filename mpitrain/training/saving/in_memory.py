"""Copies of the state in memory of the node, after every few steps.

    after step 57   each rank copies what it would write as a shard of a checkpoint, without a message
    a rank dies     the two newest copies of each rank are still there (memory_folder.py says where)
    the next start  makes a checkpoint of step 57 of them (copied_step.py); any layout can read it

No rank can be two copies ahead of another, as every step ends with sums over all ranks: of the two
newest copies one is of a step that all have.
"""

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from mpitrain.actor.actor import Actor
from mpitrain.checkpoint.dtypes import NAMES
from mpitrain.checkpoint.folders import find
from mpitrain.checkpoint.meta import StepInfo
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import BUSY, RankStatus
from mpitrain.comm.base.world import World
from mpitrain.errors import CheckpointError, StorageError
from mpitrain.inputs import remove, replacing
from mpitrain.training.saving.memory_folder import (
    COPIES,
    GENERATIONS,
    CopiedPart,
    CopyFile,
    Manifest,
    copies_in,
    remove_memory_folder,
)
from mpitrain.training.saving.saver import about_steps
from mpitrain.training.saving.state_io import Parts, Snapshot

ALIGNMENT = 64  # bytes: a cache line


class MemoryCopies:
    """Copies of an actor's state in memory, between two steps.

    folder: of the run in memory; None: there is none.
    num_bytes: of one copy, of all ranks.  say: prints a line on the first rank.

    Making it, forget() and end() are collective over all ranks; copy() is not.
    """

    def __init__(
        self,
        actor: Actor,
        world: World,
        place: RankStatus,
        rundir: RunDir,
        folder: Path | None,
        say: Callable[[str], None],
    ):
        self._world = world
        self._place = place
        self._rundir = rundir
        self._folder = folder
        self._every = actor.plan.config.recovery.every if folder else 0
        self._say = say
        self._count = 0
        self._seconds = 0.0
        self._file: CopyFile | None = None
        self._snapshots: list[Snapshot] = []
        self.num_bytes = 0
        if self._every:
            self._begin(actor, about_steps(actor, world))

    def _begin(self, actor: Actor, about: StepInfo) -> None:
        """Make the files of all ranks. Without room for them there are no copies: that is said."""
        world = self._world
        mine = _aligned_bytes(actor)
        sizes = world.all_gather("what is copied in memory", mine)
        owners = [rank for rank, num_bytes in enumerate(sizes) if num_bytes]
        self.num_bytes = sum(sizes)

        def make_folder() -> Path:
            self._remove_copies()  # of earlier starts: a checkpoint was made of them, or none could be
            folder = self._folder / f"{COPIES}{secrets.token_hex(4)}"
            folder.mkdir(mode=0o700)
            return folder

        def make_file() -> None:
            if mine:
                path = folder / f"shard-{owners.index(world.rank)}"
                self._make(actor, path, mine, len(owners), about)

        try:
            folder = world.on_first_rank("making a folder in memory", make_folder)
            world.on_every_rank("making room for copies in memory", make_file)
        except (CheckpointError, StorageError) as error:
            self._every = 0
            world.on_first_rank("removing what is in memory", self._remove_copies)
            self._say(f"no copies in memory (recovery.every): {error.args[0]}")

    def _make(self, actor: Actor, path: Path, num_bytes: int, num_shards: int, about: StepInfo) -> None:
        """Make the file of this rank, and beside it what its copies hold."""
        self._file = CopyFile.make(path.with_suffix(".bin"), num_bytes)
        self._snapshots = [
            Snapshot(actor, copied=True, allocate=_Allocator(self._file, generation).take)
            for generation in range(GENERATIONS)
        ]
        start = self._file.address(0)
        parts = _described(self._snapshots[0].parts(), start)
        manifest = Manifest(num_shards, num_bytes, parts, about.config, dict(about.writer))
        with replacing(path.with_suffix(".json")) as file:
            file.write(msgspec.json.encode(manifest))

    def due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def copy(self, step: int, meta: dict) -> None:
        """Copy the state as it is after a step. It sends nothing."""
        begin_s = time.monotonic()
        with self._place.at("save", f"copying step {step} in memory", BUSY):
            if self._file is not None:
                generation = self._count % GENERATIONS
                self._file.begin(generation)
                self._snapshots[generation].take()
                self._file.end(generation, step, meta)
            if self._count == 1 and self._world.rank == 0:  # all ranks have made their first copy
                self._remove_steps()
        self._count += 1
        self._seconds += time.monotonic() - begin_s

    def forget(self) -> None:
        """Give up all that is there: the run goes back to an earlier step."""
        for generation in range(GENERATIONS if self._file is not None else 0):
            self._file.begin(generation)
        if self._folder:
            self._world.on_first_rank("removing what is in memory", self._remove_steps)

    def end(self) -> None:
        """Remove everything of the run in memory, at its end."""
        if self._folder:
            self._world.on_first_rank(
                "removing what is in memory", lambda: remove_memory_folder(self._rundir)
            )

    def describe(self) -> str:
        """Say what copies have cost, if there were any."""
        if not self._count:
            return ""
        each_ms = 1e3 * self._seconds / self._count
        total = GENERATIONS * self.num_bytes / 1e6
        return (
            f"copies in memory: {self._count:,}, {each_ms:,.2f} ms each on rank 0, for which a step "
            f"waits; they take {total:,.2f} MB of the node's memory"
        )

    def _remove_copies(self) -> None:
        for path in copies_in(self._folder):
            remove(path)

    def _remove_steps(self) -> None:
        """Remove the checkpoints that starts have made of copies."""
        for path in find(self._folder).values():
            remove(path)


class _Allocator:
    """Gives out the memory of one copy, from its beginning on."""

    def __init__(self, file: CopyFile, generation: int):
        self._file = file
        self._generation = generation
        self._used = 0

    def take(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = length * dtype.itemsize
        if not num_bytes:
            return torch.empty(0, dtype=dtype)
        memory = self._file.memory(self._generation, self._used, num_bytes)
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(memory, dtype=dtype)


def _aligned_bytes(actor: Actor) -> int:
    """Return what one copy of this rank's state takes; each tensor begins at a cache line."""
    live = Snapshot(actor, copied=False)
    return sum(-(-num_bytes // ALIGNMENT) * ALIGNMENT for num_bytes in live.sizes)


def _described(parts: Parts, start: int) -> list[CopiedPart]:
    """Return where the parts of a snapshot lie behind an address."""
    return [
        CopiedPart(
            name,
            NAMES[array.dtype],
            list(array.shape),
            list(extent.global_shape),
            list(extent.offset),
            array.__array_interface__["data"][0] - start,
        )
        for name, held in parts.items()
        for array, extent in held
    ]
