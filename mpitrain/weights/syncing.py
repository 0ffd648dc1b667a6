"""Files that a thread syncs to the disk, while others are written and all are read back."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from mpitrain.cluster.threads import submitted


class Syncing(AbstractContextManager):
    """Syncs files one after the other, each once it is written. Owns what it was given until close()."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mpitrain-sync")
        self._files: list[tuple[Path, Future[None]]] = []

    def add(self, path: Path, file: BinaryIO) -> None:
        """Sync a file that is complete, and close it; where no thread can be started, at once."""
        self._files.append((path, submitted(self._pool, _sync, file)))

    def wait(self) -> None:
        """Wait until all files are on the disk. Raises OSError, with the name of one that isn't."""
        for path, done in self._files:
            try:
                done.result()
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None

    def close(self) -> None:
        """Wait until all files are closed."""
        self._pool.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()


def _sync(file: BinaryIO) -> None:
    with file:
        os.fsync(file.fileno())
