"""Where a run keeps copies of its state in memory of the node, and how they are read.

    /dev/shm/mpitrain-3f9a2c61d0b47e58    of one run; outlives its processes, not the node
        run                               the absolute path of the run directory
        copies-5d1c/shard-0.json          what of which arrays the copies of a rank hold, and where
        copies-5d1c/shard-0.bin           its two newest copies, byte for byte
        step-00000057                     the checkpoint that a start has made of copies
    runs/my/recovery.json                 names that folder; without it nothing is read there

A copied run directory names a folder of another run, and one that was removed names none: neither
is resumed from what isn't its own. A copy counts if its two marks say the same step: a rank that is
killed while it copies leaves different ones. A step counts if every shard has a copy of it.
"""

import json
import math
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from mpitrain.checkpoint.folders import find
from mpitrain.cluster.rundir import RunDir
from mpitrain.errors import CheckpointError
from mpitrain.inputs import kind_of, names_in, open_regular, read_regular, remove, replacing, shown

PREFIX = "mpitrain-"
COPIES = "copies-"
RUN = "run"
MOST_BYTES = 1 << 14
MOST_MANIFEST_BYTES = 1 << 28
GENERATIONS = 2  # the newest copy, and the one before it while that is replaced
MARKS = 64  # bytes: two marks, and the length of the meta
META_BYTES = 1 << 20
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
    """What the copies of one rank hold.

    num_bytes: of one copy.  config, writer: as of a checkpoint.
    """

    num_shards: Annotated[int, Meta(ge=1, le=1 << 24)]
    num_bytes: Natural
    parts: list[CopiedPart]
    config: str
    writer: dict


class CopyFile:
    """The copies of one rank in memory, each of `num_bytes` bytes."""

    def __init__(self, memory: mmap.mmap, num_bytes: int):
        self._memory = memory
        self._stride = MARKS + META_BYTES + num_bytes
        self._num_bytes = num_bytes

    @classmethod
    def make(cls, path: Path, num_bytes: int) -> "CopyFile":
        """Make the file, and allocate all of it: short memory is an OSError now, and no signal later."""
        size = GENERATIONS * (MARKS + META_BYTES + num_bytes)
        file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(file, 0, size)
            return cls(mmap.mmap(file, size), num_bytes)
        finally:
            os.close(file)

    @classmethod
    def read(cls, path: Path, num_bytes: int) -> "CopyFile":
        """Open the file to read. Raises OSError, ValueError of another size."""
        size = GENERATIONS * (MARKS + META_BYTES + num_bytes)
        file = open_regular(path)
        try:
            if os.fstat(file).st_size != size:
                raise ValueError(f"{path} has {os.fstat(file).st_size:,} bytes, needed {size:,}")
            return cls(mmap.mmap(file, size, prot=mmap.PROT_READ), num_bytes)
        finally:
            os.close(file)

    def begin(self, generation: int) -> None:
        """Mark a copy as being written: its marks differ."""
        self._marks(generation)[1] = -1

    def end(self, generation: int, step: int, meta: Mapping) -> None:
        """Mark a copy as that of a step."""
        text = json.dumps(meta).encode()
        if len(text) > META_BYTES:
            raise CheckpointError(
                f"meta of step {step} has {len(text):,} bytes, at most {META_BYTES:,} can be"
            )
        begin = generation * self._stride + MARKS
        self._memory[begin : begin + len(text)] = text
        marks = self._marks(generation)
        marks[2] = len(text)
        marks[0] = step
        marks[1] = step

    def generation_of(self, step: int) -> int | None:
        return next((at for at in range(GENERATIONS) if self._step(at) == step), None)

    def steps(self) -> set[int]:
        """Return the steps of which it has a whole copy."""
        return {step for at in range(GENERATIONS) if (step := self._step(at)) > 0}

    def meta(self, generation: int) -> dict:
        begin = generation * self._stride + MARKS
        return json.loads(self._memory[begin : begin + int(self._marks(generation)[2])])

    def memory(self, generation: int, at: int, num_bytes: int) -> memoryview:
        """Return bytes of a copy. Raises ValueError where it ends before them."""
        if at + num_bytes > self._num_bytes:
            raise ValueError(f"{num_bytes:,} bytes at byte {at:,} of {self._num_bytes:,}")
        begin = generation * self._stride + MARKS + META_BYTES + at
        return memoryview(self._memory)[begin : begin + num_bytes]

    def array(self, generation: int, at: int, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        """Return a box of a copy, in its memory. Raises ValueError where the copy is too short."""
        memory = self.memory(generation, at, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(memory, dtype).reshape(shape)

    def address(self, generation: int) -> int:
        """Return the address at which a copy begins, in this process."""
        begin = generation * self._stride + MARKS + META_BYTES
        return np.frombuffer(self._memory, np.uint8).ctypes.data + begin

    def _marks(self, generation: int) -> np.ndarray:
        return np.frombuffer(self._memory, np.int64, 3, generation * self._stride)

    def _step(self, generation: int) -> int:
        first, second, _ = self._marks(generation).tolist()
        return first if first == second else 0


class CopiedStep(NamedTuple):
    """The newest step of which every shard has a copy."""

    folder: Path
    step: int
    num_shards: int


# ---------------------------------------------------------------- the folder of a run


def memory_folder(rundir: RunDir) -> Path | None:
    """Return the folder in memory that a run directory names, if it is this run's; else None."""
    own = str(rundir.path.absolute())
    try:
        folder = Path(json.loads(read_regular(rundir.recovery, MOST_BYTES))["folder"])
        is_own = folder.name.startswith(PREFIX) and folder.lstat().st_uid == os.getuid()
        if not is_own or kind_of(folder) != "a folder":
            return None
        return folder if read_regular(folder / RUN, MOST_BYTES).decode() == own else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # of another boot of the node, of another node, or a stranger's


def make_memory_folder(rundir: RunDir, parent: str) -> Path:
    """Return the folder of a run in memory; make it if need be. For one rank.

    Raises CheckpointError.
    """
    if folder := memory_folder(rundir):
        return folder
    folder = Path(parent).absolute() / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700)
        for path, text in (
            (folder / RUN, str(rundir.path.absolute())),
            (rundir.recovery, json.dumps({"folder": str(folder)}) + "\n"),
        ):
            with replacing(path) as file:
                file.write(text.encode())
    except OSError as error:
        what = f"recovery.folder = {shown(parent)}: {error.strerror}"
        raise CheckpointError(
            f"{what}; choose a directory in memory that can be written to, or leave recovery.every out"
        ) from None
    return folder


def remove_memory_folder(rundir: RunDir) -> None:
    """Remove what a run directory has in memory, and the name of it. For one rank."""
    folder = memory_folder(rundir)
    with suppress(OSError):  # then the node's next boot does
        if folder:
            remove(folder)
        remove(rundir.recovery)


def newest_step_in_memory(rundir: RunDir) -> int:
    """Return the newest step that a run directory has in memory of this node; 0 for none."""
    folder = memory_folder(rundir)
    if folder is None:
        return 0
    copied = newest_copied(folder)
    with suppress(CheckpointError):
        return max([copied.step if copied else 0, *find(folder)])
    return 0


# ---------------------------------------------------------------- copies that a start left


def copies_in(folder: Path) -> list[Path]:
    """Return the folders of copies, one for each start that has left some."""
    with suppress(OSError):
        return [
            folder / name for name, is_folder in names_in(folder) if is_folder and name.startswith(COPIES)
        ]
    return []


def newest_copied(folder: Path) -> CopiedStep | None:
    """Return the newest step that copies of one start hold in whole; None if there is none."""
    whole = [step for path in copies_in(folder) if (step := _whole_step(path))]
    return max(whole, key=lambda copied: copied.step, default=None)


def read_copy(copied: CopiedStep, number: int) -> tuple[Manifest, CopyFile]:
    """Return what one shard holds. Raises CheckpointError."""
    try:
        text = read_regular(copied.folder / f"shard-{number}.json", MOST_MANIFEST_BYTES)
        manifest = msgspec.json.decode(text, type=Manifest)
        return manifest, CopyFile.read(copied.folder / f"shard-{number}.bin", manifest.num_bytes)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{shown(copied.folder)}: shard {number} of copies can't be read: {error}"
        ) from None


def _whole_step(folder: Path) -> CopiedStep | None:
    try:
        first = CopiedStep(folder, 0, 1)
        manifest, copies = read_copy(first, 0)
        steps = copies.steps()
        for number in range(1, manifest.num_shards):
            steps &= read_copy(first, number)[1].steps()
        return CopiedStep(folder, max(steps), manifest.num_shards) if steps else None
    except CheckpointError:
        return None
