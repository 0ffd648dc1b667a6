"""Copies of the state in memory of the nodes, after every few steps.

    after step 57   each rank copies what it would write as a shard of a checkpoint, without a message
    in step 58      a part that no rank of another node copies, too, goes to one there (COPY)
    a rank dies     the two newest copies of each rank are still there (memory_folder.py says where)
    a node dies     of its ranks' parts other nodes have them
    the next start  makes a checkpoint of step 57 of them (copied_step.py); any layout can read it

No rank can be two copies ahead of another, as every step ends with sums over all ranks, after COPY
is complete: of the two newest copies, one is of a step that all have, also on other nodes.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from mpitrain.actor.actor import Actor
from mpitrain.actor.partner_copies import CopyExchange
from mpitrain.checkpoint.dtypes import NAMES
from mpitrain.checkpoint.meta import StepInfo
from mpitrain.cluster.entry import warn
from mpitrain.cluster.status_board import BUSY
from mpitrain.comm.base.world import World
from mpitrain.errors import CheckpointError, StorageError
from mpitrain.inputs import read_regular, write_regular
from mpitrain.parallel.zero.shards import ParameterShard
from mpitrain.plan.axes import COPIES as COPIES_AXIS
from mpitrain.plan.division.domains import DOMAINS
from mpitrain.plan.predict.snapshot_bytes import DIGEST_BYTES, GENERATIONS, aligned_bytes, file_bytes
from mpitrain.training.saving.memory_folder import (
    COPIES,
    MOST_MANIFEST_BYTES,
    CopiedPart,
    CopyFile,
    Manifest,
    NodeMemory,
)
from mpitrain.training.saving.saver import about_steps
from mpitrain.training.saving.state_io import Parts, Snapshot

PartKey = tuple[int, str]  # the first rank that has a part of the state; its domain, "" of those sent


@dataclass(frozen=True)
class CopiedPieces:
    """A part of the state that this rank copies. num_bytes: of a copy."""

    key: PartKey
    pieces: Sequence[ParameterShard]
    num_bytes: int


class CopyTaker:
    """Makes one generation of the copies of a part of the state, in its file."""

    def __init__(self, actor: Actor, file: CopyFile, generation: int, pieces: Sequence[ParameterShard]):
        self._file = file
        self._generation = generation
        self.snapshot = Snapshot(actor, True, _Allocator(file, generation).take, pieces)
        self._spans = list(self._cut())

    def take(self, step: int, meta: Mapping[str, Any]) -> None:
        """Copy the state as it is after a step, with its digest: each piece while caches have it."""
        digest = xxhash.xxh3_64()
        spans = iter(self._spans)
        self._file.begin(self._generation)
        self.snapshot.take(lambda: digest.update(next(spans)))
        self._file.end(self._generation, step, meta, digest.intdigest())

    def _cut(self) -> Iterator[memoryview]:
        """Yield the memory that the digest is of, cut after each piece that is copied."""
        used = self._file.used_bytes_of(self._generation)
        start = used.ctypes.data
        arrays = [np.frombuffer(piece, np.uint8) for piece in self.snapshot.targets]
        ends = [array.ctypes.data - start + len(array) for array in arrays]
        for begin, end in pairwise([0, *ends[:-1], len(used)]):
            yield used[begin:end].data


@dataclass
class MemoryCopies:
    """Copies of an actor's state in memory, between two steps. All but copy() is collective.

    _memory: where; None: there are none.
    _say: prints a line on the first rank.
    num_bytes, own_bytes: of memory that they take, of all ranks and of this one.
    """

    _actor: Actor
    _world: World
    _memory: NodeMemory | None
    _say: Callable[[str], None]
    _count: int = 0
    _seconds: float = 0.0
    _files: list[CopyFile] = field(default_factory=list)
    _takers: list[list[CopyTaker]] = field(default_factory=list)  # of each file, by generation
    _exchange: "PartnerExchange | None" = None
    num_bytes: int = 0
    own_bytes: int = 0

    def __post_init__(self) -> None:
        self._every = self._actor.plan.config.recovery.every if self._memory else 0
        if self._memory and self._every:
            self._begin(self._memory, about_steps(self._actor, self._world))

    def _begin(self, memory: NodeMemory, about: StepInfo) -> None:
        """Make the files of all ranks. Without room for them there are no copies: that is said."""
        world = self._world
        parts = copied_pieces(self._actor)
        sizes = world.all_gather("what is copied in memory", {part.key: part.num_bytes for part in parts})
        numbers = {key: number for number, key in enumerate(sorted({key for mine in sizes for key in mine}))}
        sent = max(mine.get((rank, ""), 0) for rank, mine in enumerate(sizes)) + DIGEST_BYTES
        exchanges = self._actor.partner_copies is not None
        name = world.on_first_rank("naming copies", lambda: f"{COPIES}{secrets.token_hex(4)}")
        folder = memory.own_folder / name

        def make() -> None:
            for part in parts:
                is_sent = exchanges and part.key[1] == ""
                self._add(part, folder, numbers, sent if is_sent else part.num_bytes, about)

        def make_folder() -> None:
            memory.remove_copies()  # of earlier starts: a checkpoint was made of them, or none could be
            folder.mkdir(mode=0o700)

        try:
            memory.on_each_node("making a folder in memory", make_folder)
            world.on_every_rank("making room for copies in memory", make)
            if exchanges:
                own = next((file for part, file in zip(parts, self._files) if part.key[1] == ""), None)
                name = f"shard-{numbers.get((world.rank, ''))}.json"
                self._exchange = PartnerExchange(self._actor, world, folder / name, own, sent)
            taken = [file_bytes(file.num_bytes) for file in [*self._files, *self._received()]]
            self.own_bytes = sum(taken)
            self.num_bytes = sum(world.all_gather("what is copied in memory", self.own_bytes))
        except (CheckpointError, StorageError) as error:
            self._every = 0
            self._files, self._takers = [], []  # nothing else holds their memory
            memory.on_each_node("removing what is in memory", memory.remove_copies)
            self._say(f"no copies in memory (recovery.every): {error.args[0]}")

    def _add(
        self, part: CopiedPieces, folder: Path, numbers: dict[PartKey, int], num_bytes: int, about: StepInfo
    ) -> None:
        """Make the file of a part of the state, and beside it what its copies hold."""
        path = folder / f"shard-{numbers[part.key]}"
        file = CopyFile.make(path.with_suffix(".bin"), num_bytes, part.num_bytes)
        takers = [CopyTaker(self._actor, file, generation, part.pieces) for generation in range(GENERATIONS)]
        parts = _described(takers[0].snapshot.parts(), file.bytes_of(0).ctypes.data)
        writer = dict(about.writer)
        manifest = Manifest(len(numbers), num_bytes, parts, about.config, writer, self._world.num_nodes)
        text = msgspec.json.encode(manifest)
        file.describe_by(text)
        write_regular(path.with_suffix(".json"), text)
        self._files.append(file)
        self._takers.append(takers)

    def _received(self) -> list[CopyFile]:
        received = self._exchange.received if self._exchange else None
        return [] if received is None else [received]

    def due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def copy(self, step: int, meta: dict[str, Any]) -> None:
        """Copy the state as it is after a step. It sends nothing: the next step's COPY does."""
        begin_s = time.monotonic()
        with self._actor.place.at("save", f"copying step {step} in memory", BUSY):
            generation = self._count % GENERATIONS
            for takers in self._takers:
                takers[generation].take(step, meta)
            if self._exchange is not None:
                self._exchange.offer(generation, step, meta)
            if self._count == 1 and self._memory and self._memory.leads:  # all have made their first copy
                self._memory.remove_steps()
        self._count += 1
        self._seconds += time.monotonic() - begin_s

    def forget(self) -> None:
        """Give up all that is there: the run goes back to an earlier step."""
        if self._actor.partner_copies is not None:
            self._actor.partner_copies.give(None)
        for file in [*self._files, *self._received()]:
            for generation in range(GENERATIONS):
                file.begin(generation)
        if self._memory:
            self._memory.on_each_node("removing what is in memory", self._memory.remove_steps)

    def end(self) -> None:
        """Remove everything of the run in memory, at its end."""
        if self._memory:
            self._memory.remove()

    def describe(self) -> str:
        """Say what copies have cost, if there were any."""
        if not self._count:
            return ""
        each_ms = 1e3 * self._seconds / self._count
        line = (
            f"copies in memory: {self._count:,}, {each_ms:,.2f} ms each on rank 0, for which a step "
            f"waits; they take {self.num_bytes / 1e6:,.2f} MB of all nodes' memory"
        )
        if self._exchange is not None:
            line = f"{line}; {self._exchange.num_bytes / 1e6:,.2f} MB each go to another node, under the step"
        return line


class PartnerExchange:
    """What is sent to a partner on another node, and what comes from one. Making it is collective.

    path: of what says what is sent.
    own: copies of this rank that are sent; None: it has nothing that no other node has.
    num_bytes: of a copy that is sent, alike on all ranks. At its end is the digest of the rest.
    received: copies of the other's state; None: it sends nothing of use.
    """

    def __init__(self, actor: Actor, world: World, path: Path, own: CopyFile | None, num_bytes: int):
        assert actor.partner_copies is not None
        axis = actor.mesh[COPIES_AXIS]
        self.num_bytes = num_bytes
        self._own = own
        self._copies = actor.partner_copies
        self.source = axis.ranks[axis.rank - 1]
        manifests = axis.all_gather_objects(
            None if own is None else (path.name, read_regular(path, MOST_MANIFEST_BYTES))
        )
        self.received: CopyFile | None = None
        name_and_text = manifests[axis.rank - 1]
        # sent by a rank that has nothing; received from one
        self._nothing = np.zeros(num_bytes if own is None else 0, np.uint8)
        self._unread = np.zeros(num_bytes if name_and_text is None else 0, np.uint8)

        def make() -> None:
            if name_and_text is not None:
                name, text = name_and_text
                used_bytes = msgspec.json.decode(text, type=Manifest).used_bytes
                self.received = CopyFile.make(path.with_name(name).with_suffix(".bin"), num_bytes, used_bytes)
                self.received.describe_by(text)
                write_regular(path.with_name(name), text)

        world.on_every_rank("making room for copies of another node", make)

    def offer(self, generation: int, step: int, meta: dict[str, Any]) -> None:
        """Have the copy of a step sent at the next COPY."""
        own = self._nothing if self._own is None else self._own.bytes_of(generation)
        partners = self._unread
        if self.received is not None:
            self.received.begin(generation)
            partners = self.received.bytes_of(generation)
        if self._own is not None:
            _digest_in(own)[0] = self._own.marked_digest(generation)
        arrived = partial(self._arrived, generation, step, meta)
        self._copies.give(CopyExchange(own, partners, arrived))

    def _arrived(self, generation: int, step: int, meta: dict[str, Any]) -> None:
        """Mark what was received as a copy, if it has the digest that it was sent with."""
        if self.received is None:
            return
        digest = int(_digest_in(self.received.bytes_of(generation))[0])
        if digest == self.received.digest(generation):
            self.received.end(generation, step, meta, digest)
            return
        warn(
            f"mpitrain: the copy of rank {self.source}'s state after step {step} arrived with another digest "
            "than it was sent with, by an error of memory or of a link; this copy isn't kept"
        )


def copied_pieces(actor: Actor) -> list[CopiedPieces]:
    """Return the parts of the state that this rank copies; what no other node has is one part."""
    rank = actor.mesh.rank
    alone: list[ParameterShard] = []
    parts: list[tuple[PartKey, Sequence[ParameterShard]]] = []
    for name, pieces in actor.gradients.replicas.items():
        first, second = actor.plan.axes.holders(rank, DOMAINS[name].replicate)
        if second is None:
            alone += pieces if rank == first else []
        elif rank in (first, second):
            parts.append(((first, name), pieces))
    parts.append(((rank, ""), alone))
    sized = [CopiedPieces(key, pieces, _bytes_of(actor, pieces)) for key, pieces in parts]
    return [part for part in sized if part.num_bytes]


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
        self._used += aligned_bytes(num_bytes)
        return torch.frombuffer(memory, dtype=dtype)


def _bytes_of(actor: Actor, pieces: Sequence[ParameterShard]) -> int:
    """Return what one copy of some pieces takes; each tensor begins at a cache line."""
    return sum(map(aligned_bytes, Snapshot(actor, copied=False, pieces=pieces).sizes))


def _described(parts: Parts, start: int) -> list[CopiedPart]:
    """Return where the parts of a snapshot lie after an address."""
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


def _digest_in(copy: np.ndarray) -> np.ndarray:
    """Return the digest that a copy was sent with, to read and to write, [1]."""
    return copy[-DIGEST_BYTES:][:8].view(np.uint64)
