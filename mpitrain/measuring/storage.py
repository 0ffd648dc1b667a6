"""What a node writes a second to the file system of checkpoints, while all ranks write."""

import os
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from mpitrain.comm.base.world import World
from mpitrain.errors import ConfigError
from mpitrain.inputs import os_errors_as, shown
from mpitrain.measuring.device import REPEATS, Samples

WRITTEN = 1 << 27  # bytes of a rank
AT_ONCE = 1 << 22


def require_folder(folder: str) -> None:
    """Raise ConfigError for a folder in which no file can be made."""
    try:
        if not folder:  # to tempfile the current one
            raise ValueError("found no name")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--storage {shown(folder)}: {why}; needed a folder of yours, where checkpoints are to be"
        ) from None


def measured(world: World, folder: str, near: int) -> Iterator[Samples]:
    """Yield bytes/s of a node of `near` ranks: as all of them write as fast as this one. Collective.

    The file has no name: a rank that is killed leaves nothing behind. Raises ConfigError on all ranks.
    """
    rates = []
    for _ in range(REPEATS):
        world.barrier("all ranks to write")
        seconds = world.on_every_rank("writing to --storage", lambda: _seconds(folder))
        rates.append(near * WRITTEN / seconds)
    yield Samples("storage.write", rates)


def _seconds(folder: str) -> float:
    """Return how long a file takes until it is on disk. What can be compressed would be faster."""
    piece = np.random.default_rng(os.getpid()).bytes(AT_ONCE)
    needed = f"needed room for {WRITTEN >> 20} MiB of each rank"
    with (
        os_errors_as(ConfigError, f"--storage {shown(folder)}", needed),
        tempfile.TemporaryFile(dir=folder, buffering=0) as file,
    ):
        begin = time.perf_counter()
        for _ in range(WRITTEN // AT_ONCE):
            file.write(piece)
        os.fsync(file.fileno())
        return time.perf_counter() - begin
