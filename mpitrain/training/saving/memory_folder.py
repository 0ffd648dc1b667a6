"""Where a run keeps copies of its state in memory of its nodes, and how they are read.

    /dev/shm/mpitrain-3f9a2c61d0b47e58    of one run; outlives its processes, not the node
        run                               the path of the run directory, links resolved
        copies-5d1c/shard-0.json          what of which arrays a part of the state holds, and where
        copies-5d1c/shard-0.bin           its two newest copies, byte for byte
        step-00000057                     the checkpoint that a start has made of copies
    /dev/shm/mpitrain-3f9a2c61d0b47e58.4  the same of the node whose first rank was 4
    runs/my/recovery.json                 names the first; without it nothing is read there; and the
                                          step in memory after which the last start has resumed

A copied run directory names a folder of another run, and isn't resumed from it. A copy counts if
its two marks say the same step: a rank that is killed while it copies leaves different ones. A step
counts if every part has a copy of it, on whatever node, with its digest (copied_step.py).
"""

import json
import math
import mmap
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from mpitrain.checkpoint.dtypes import DTYPES
from mpitrain.checkpoint.folders import find
from mpitrain.cluster.rundir import RunDir
from mpitrain.comm.base.world import World
from mpitrain.errors import CheckpointError
from mpitrain.inputs import kind_of, names_in, open_regular, read_regular, remove, shown, write_regular
from mpitrain.plan.predict.snapshot_bytes import GENERATIONS, MARKS, META_BYTES, aligned_bytes, file_bytes

PREFIX = "mpitrain-"
COPIES = "copies-"
RUN = "run"
MOST_BYTES = 1 << 14
MOST_MANIFEST_BYTES = 1 << 28
Natural = Annotated[int, Meta(ge=0, le=2**62)]


class CopiedPart(msgspec.Struct, frozen=True):
    """A box of an array in the copies of a rank. at: where its bytes begin in a copy."""

    name: str
    dtype: str
    shape: list[Natural]
    whole: list[Natural]
    offset: list[Natural]
    at: Natural


class Manifest(msgspec.Struct, frozen=True):
    """What the copies of one part of the state hold.

    num_shards: parts of the whole state.  num_bytes: of one copy.  config, writer: as of a checkpoint.
    num_nodes: on which they are; of several, a node sees some.
    """

    num_shards: Annotated[int, Meta(ge=1, le=1 << 24)]
    num_bytes: Natural
    parts: list[CopiedPart]
    config: str
    writer: dict
    num_nodes: Natural = 1

    @property
    def used_bytes(self) -> int:
        """Bytes of a copy up to the end of its last part."""
        ends = (part.at + math.prod(part.shape) * DTYPES[part.dtype].itemsize for part in self.parts)
        return aligned_bytes(max(ends, default=0))


class CopyFile:
    """The copies of one part of the state in memory, each of `num_bytes` bytes, of which the first are used.

    Before each copy: its step twice, the bytes of its meta, the digests of its used bytes, and of
    its meta with the manifest.
    """

    def __init__(self, memory: mmap.mmap, num_bytes: int, used_bytes: int):
        self._memory = memory
        self._stride = MARKS + META_BYTES + num_bytes
        self._used_bytes = used_bytes
        self.num_bytes = num_bytes
        self._manifest_digest = 0

    def describe_by(self, manifest: bytes) -> None:
        """Take note of what says where arrays lie in a copy: with another text no copy counts."""
        self._manifest_digest = xxhash.xxh3_64_intdigest(manifest)

    @classmethod
    def make(cls, path: Path, num_bytes: int, used_bytes: int) -> "CopyFile":
        """Make the file, and allocate all of it: short memory is an error now, and no signal later.

        Raises CheckpointError.
        """
        size = file_bytes(num_bytes)
        file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(file, 0, size)
            return cls(mmap.mmap(file, size), num_bytes, used_bytes)
        except OSError as error:
            what = f"{shown(path)} of {size:,} bytes: {shown(error.strerror)}"
            change = "free some space there, or choose another recovery.folder"
            raise CheckpointError(f"{what}; {change}") from error
        finally:
            os.close(file)

    @classmethod
    def read(cls, path: Path, num_bytes: int, used_bytes: int) -> "CopyFile":
        """Open the file that a start has left. Raises OSError, ValueError of another size."""
        size = file_bytes(num_bytes)
        file = open_regular(path, os.O_RDWR)
        try:
            if os.fstat(file).st_size != size:
                raise ValueError(f"{path} has {os.fstat(file).st_size:,} bytes, needed {size:,}")
            return cls(mmap.mmap(file, size), num_bytes, used_bytes)
        finally:
            os.close(file)

    def drop_others(self, generation: int) -> None:
        """Give the memory of the other copies back to the node, where its system can do that."""
        for other in set(range(GENERATIONS)) - {generation}:
            self.begin(other)
            begin = aligned_bytes(other * self._stride + MARKS, mmap.PAGESIZE)
            end = aligned_bytes((other + 1) * self._stride + MARKS, mmap.PAGESIZE)
            with suppress(OSError, AttributeError, ValueError):  # no tmpfs, or no Linux
                self._memory.madvise(mmap.MADV_REMOVE, begin, end - mmap.PAGESIZE - begin)

    def begin(self, generation: int) -> None:
        """Mark a copy as being written: its marks differ."""
        self._marks(generation)[1] = -1

    def digest(self, generation: int) -> int:
        """Return the digest of a copy, of its bytes as they are now."""
        return xxhash.xxh3_64_intdigest(self.used_bytes_of(generation).data)

    def end(self, generation: int, step: int, meta: Mapping, digest: int) -> None:
        """Mark a copy as that of a step, with the digest that its bytes have to have."""
        text = json.dumps(meta).encode()
        if len(text) > META_BYTES:
            what = f"meta of step {step} has {len(text):,} bytes"
            raise CheckpointError(f"{what}, at most {META_BYTES:,} can be")
        begin = generation * self._stride + MARKS
        self._memory[begin : begin + len(text)] = text
        marks = self._marks(generation)
        marks[2] = len(text)
        marks[3:].view(np.uint64)[:] = digest, self._digest_of_meta(text, step)
        marks[0] = step
        marks[1] = step

    def generation_of(self, step: int) -> int | None:
        return next((at for at in range(GENERATIONS) if self._step(at) == step), None)

    def steps(self) -> set[int]:
        """Return the steps of which it has a whole copy."""
        return {step for at in range(GENERATIONS) if (step := self._step(at)) > 0}

    def marked_digest(self, generation: int) -> int:
        """Return the digest that a copy was marked with."""
        return int(self._marks(generation)[3:].view(np.uint64)[0])

    def meta(self, generation: int) -> dict:
        return json.loads(self._meta_text(generation))

    def _meta_text(self, generation: int) -> bytes:
        begin = generation * self._stride + MARKS
        length = int(self._marks(generation)[2])
        return self._memory[begin : begin + length] if 0 <= length <= META_BYTES else b""

    def memory(self, generation: int, at: int, num_bytes: int) -> memoryview:
        """Return bytes of a copy. Raises ValueError where it ends before them."""
        if at + num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes:,} bytes at byte {at:,} of {self.num_bytes:,}")
        begin = generation * self._stride + MARKS + META_BYTES + at
        return memoryview(self._memory)[begin : begin + num_bytes]

    def array(self, generation: int, at: int, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        """Return a box of a copy, in its memory. Raises ValueError where the copy is too short."""
        memory = self.memory(generation, at, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(memory, dtype).reshape(shape)

    def bytes_of(self, generation: int) -> np.ndarray:
        """Return a whole copy, in its memory."""
        return np.frombuffer(self.memory(generation, 0, self.num_bytes), np.uint8)

    def used_bytes_of(self, generation: int) -> np.ndarray:
        return self.bytes_of(generation)[: self._used_bytes]

    def _marks(self, generation: int) -> np.ndarray:
        return np.frombuffer(self._memory, np.int64, 5, generation * self._stride)

    def _step(self, generation: int) -> int:
        """Return the step of a copy; 0: it isn't whole, or its marks or its meta were changed."""
        first, second = self._marks(generation)[:2].tolist()
        if first != second or first <= 0:
            return 0
        digest = int(self._marks(generation)[3:].view(np.uint64)[1])
        return first if digest == self._digest_of_meta(self._meta_text(generation), first) else 0

    def _digest_of_meta(self, text: bytes, step: int) -> int:
        return xxhash.xxh3_64_intdigest(text, seed=self._manifest_digest ^ step)


# ---------------------------------------------------------------- folders of a run


def _noted(rundir: RunDir) -> dict[str, Any]:
    """Return what recovery.json says; what no run has written is nothing."""
    try:
        noted = json.loads(read_regular(rundir.recovery, MOST_BYTES))
        return noted if isinstance(noted, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def named_folder(rundir: RunDir) -> Path | None:
    """Return the folder in memory that a run directory names; None: it names none."""
    folder = _noted(rundir).get("folder")
    return Path(folder) if isinstance(folder, str) and Path(folder).name.startswith(PREFIX) else None


def resumed_step(rundir: RunDir) -> int:
    """Return the step in memory after which the last start has resumed; 0 for none."""
    step = _noted(rundir).get("resumed")
    return step if type(step) is int and step > 0 else 0


def memory_folders(rundir: RunDir) -> list[Path]:
    """Return the folders in memory of this host that are this run's, of each of its nodes here."""
    named = named_folder(rundir)
    if named is None:
        return []
    with suppress(OSError):
        names = [name for name, is_folder in names_in(named.parent) if is_folder]
        same = [name for name in names if name == named.name or name.startswith(f"{named.name}.")]
        same = sorted((name for name in same if _first_rank(name) >= 0), key=_first_rank)
        return [folder for name in same if _is_own(folder := named.parent / name, rundir)]
    return []


def _first_rank(name: str) -> int:
    """Return the first rank of the node whose folder has this name; -1 of any other name."""
    number = name.partition(".")[2]
    return int(number or 0) if re.fullmatch("[0-9]{0,9}", number) else -1


def _is_own(folder: Path, rundir: RunDir) -> bool:
    try:
        if kind_of(folder) != "a folder" or folder.lstat().st_uid != os.getuid():
            return False
        return read_regular(folder / RUN, MOST_BYTES).decode() == os.path.realpath(rundir.path)
    except (OSError, ValueError):
        return False  # a stranger's, or none any more


def _is_unfinished(folder: Path) -> bool:
    """Return whether a rank of this user was killed between making a folder and naming its run."""
    own = kind_of(folder) == "a folder" and folder.lstat().st_uid == os.getuid()
    return own and kind_of(folder / RUN) is None


def _identity(folder: Path) -> str:
    """Return what tells a folder from those of the same name on other hosts."""
    with suppress(OSError):
        stat = (folder / RUN).lstat()
        return f"{folder.name} {stat.st_ino} {stat.st_ctime_ns}"
    return folder.name


def _owner(identity: str, nodes: Sequence[int], partner: int) -> int:
    """Return which of the nodes that see a folder reads and removes it, by their first ranks."""
    first = _first_rank(identity.partition(" ")[0])
    return first if first in nodes else nodes[first // max(1, partner) % len(nodes)]


class NodeMemory:
    """The folders of a run in memory, as the ranks of one node see them.

    partner: ranks of a node, as the plan has it; 0: ranks that share memory are a node.
    first: the first rank of this node; it makes and removes what all its ranks use.
    ranks: of this node.
    Making it, and what makes or removes, is collective over all ranks.
    """

    def __init__(self, world: World, rundir: RunDir, partner: int):
        self.world = world
        self._rundir = rundir
        self._folder: Path | None = None
        mine = world.rank // partner * partner if partner else min(world.node_gather("its ranks", world.rank))
        firsts = world.all_gather("the nodes of copies in memory", mine)
        self.first = mine
        self.ranks = [rank for rank, first in enumerate(firsts) if first == mine]
        # nodes that share a host, or its /dev/shm, divide what they find there
        self._at_start = [_identity(folder) for folder in memory_folders(rundir)]
        seen = world.all_gather("folders in memory", self._at_start if self.leads else [])
        nodes = sorted(set(firsts))
        self._others = {
            name
            for name in {name for names in seen for name in names}
            if _owner(name, [node for node in nodes if name in seen[node]], partner) != mine
        }

    @property
    def own_folder(self) -> Path:
        """The folder of this node, once it is made."""
        assert self._folder is not None, "make() comes first"
        return self._folder

    @property
    def leads(self) -> bool:
        return self.world.rank == self.first

    def folders(self) -> list[Path]:
        """Return the folders that this node reads and removes, of this start and earlier ones."""
        mine = set(self._at_start) - self._others
        folders = memory_folders(self._rundir)
        return [folder for folder in folders if folder == self._folder or _identity(folder) in mine]

    def is_used(self) -> bool:
        """Return whether the run has something in memory of some node."""
        has_folders = self.leads and bool(self.folders())
        return any(self.world.all_gather("looking into memory", has_folders))

    def make(self, parent: str) -> None:
        """Make the folder of each node, unless it is there. Raises CheckpointError."""
        used = self.is_used()
        base = self.world.on_first_rank("naming a folder in memory", lambda: self._base(used, parent))
        folder = base.with_name(f"{base.name}.{self.first}" if self.first else base.name)
        self.on_each_node("making a folder in memory", lambda: self._make(folder, parent))
        self._folder = folder

    def on_each_node(self, what: str, action: Callable[[], object]) -> None:
        """Do something on the first rank of each node. An InputError is raised on all ranks."""
        self.world.on_every_rank(what, action if self.leads else lambda: None)

    def note_resumed(self, step: int) -> None:
        """Note after which step in memory this start resumes; 0: after none."""

        def note() -> None:
            with suppress(OSError):  # the run resumes all the same
                if step != resumed_step(self._rundir):
                    self._note({**_noted(self._rundir), "resumed": step})

        self.world.on_first_rank("noting the step in memory", note)

    def remove_copies(self) -> None:
        """Remove what starts have copied, of this node. For its first rank."""
        for folder in self.folders():
            for path in copies_in(folder):
                remove(path)

    def remove_steps(self) -> None:
        """Remove the checkpoints that starts have made of copies, of this node. For its first rank."""
        for folder in self.folders():
            for path in find(folder).values():
                remove(path)

    def remove(self) -> None:
        """Remove everything of the run in memory, and the name of it."""

        def remove_all() -> None:
            for folder in self.folders():
                with suppress(OSError):  # then the node's next boot does
                    # what says whose it is goes last: a start removes the rest after a kill
                    names = [name for name, _ in names_in(folder) if name != RUN]
                    for path in (*(folder / name for name in names), folder):
                        remove(path)

        def forget() -> None:
            with suppress(OSError):
                remove(self._rundir.recovery)

        self.on_each_node("removing what is in memory", remove_all)
        self.world.on_first_rank("removing what is in memory", forget)

    def _base(self, used: bool, parent: str) -> Path:
        """Return the folder that the run directory names; name one, unless it has something there."""
        named = named_folder(self._rundir)
        if used and named is not None:
            return named
        folder = Path(parent).absolute() / f"{PREFIX}{secrets.token_hex(8)}"
        self._note({"folder": str(folder)})
        return folder

    def _note(self, noted: Mapping[str, Any]) -> None:
        write_regular(self._rundir.recovery, (json.dumps(noted) + "\n").encode())

    def _make(self, folder: Path, parent: str) -> None:
        if _is_own(folder, self._rundir):
            return
        try:
            if not _is_unfinished(folder):
                folder.mkdir(mode=0o700)
            write_regular(folder / RUN, os.path.realpath(self._rundir.path).encode())
        except OSError as error:
            what = f"recovery.folder = {shown(parent)}: {error.strerror}"
            change = "choose a directory in memory that can be written to"
            raise CheckpointError(f"{what}; {change}, or leave recovery.every out") from None


# ---------------------------------------------------------------- copies that starts left


def copies_in(folder: Path) -> list[Path]:
    """Return the folders of copies, one for each start that has left some."""
    with suppress(OSError):
        names = [name for name, is_folder in names_in(folder) if is_folder]
        return [folder / name for name in names if name.startswith(COPIES)]
    return []


class CopiedStart(msgspec.Struct):
    """What a start has copied that is on a node. shards: by number, the folder and the steps it has."""

    num_shards: int
    num_nodes: int
    shards: dict[int, tuple[Path, set[int]]]


def copied_starts(folders: Sequence[Path]) -> dict[str, CopiedStart]:
    """Return what starts have copied into some folders, by their names; what is damaged doesn't count."""
    starts: dict[str, CopiedStart] = {}
    for path in (path for folder in folders for path in copies_in(folder)):
        for number in _numbers(path):
            with suppress(CheckpointError):
                manifest, copies = read_copy(path, number)
                start = starts.setdefault(path.name, CopiedStart(manifest.num_shards, manifest.num_nodes, {}))
                known = start.shards.get(number, (path, set()))
                steps = copies.steps()
                if max(steps, default=0) >= max(known[1], default=0):
                    start.shards[number] = path, steps
    return starts


def _numbers(folder: Path) -> list[int]:
    with suppress(OSError):
        names = [re.fullmatch(r"shard-([0-9]{1,9})\.json", name) for name, _ in names_in(folder)]
        return sorted(int(name[1]) for name in names if name)
    return []


def read_copy(folder: Path, number: int) -> tuple[Manifest, CopyFile]:
    """Return one part of what a start has copied. Raises CheckpointError."""
    try:
        text = read_regular(folder / f"shard-{number}.json", MOST_MANIFEST_BYTES)
        manifest = msgspec.json.decode(text, type=Manifest)
        copies = CopyFile.read(folder / f"shard-{number}.bin", manifest.num_bytes, manifest.used_bytes)
        copies.describe_by(text)
        return manifest, copies
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{shown(folder)}: shard {number} of copies can't be read: {error}") from None


def newest_step_in_memory(rundir: RunDir) -> int:
    """Return a run's newest step in memory, whole as far as this host sees; 0: there is none."""
    folders = memory_folders(rundir)
    newest = 0
    for start in copied_starts(folders).values():
        if start.num_nodes > 1 or len(start.shards) == start.num_shards:
            newest = max(newest, *set.intersection(*(steps for _, steps in start.shards.values())), 0)
    for folder in folders:
        with suppress(CheckpointError):
            newest = max(newest, *find(folder), 0)
    return newest
