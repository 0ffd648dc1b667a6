"""A run of mpitrain each rank of which notes for the test where it is, in a file that is only memory.

    mpirun -n 2 python rank_positions.py FOLDER run --set ...

FOLDER/RANK.PID holds two notes: of the place that the rank is about to tell its watchdog of, and of
the one it has told last. A rank that is stopped between the two may be reported at either; anywhere
else both are the same.
"""

import mmap
import os
import sys
from pathlib import Path

from mpitrain import cli
from mpitrain.cluster.status_board import RankStatus

LENGTH = 512


def read(path: Path) -> set[str]:
    """Return the notes of a rank that stands still."""
    content = path.read_bytes()
    return {half.rstrip(b"\0").decode() for half in (content[:LENGTH], content[LENGTH:])}


def main(folder: Path, rank: str) -> None:
    """Note where this rank is, and run mpitrain."""
    path = folder / f"{rank}.{os.getpid()}"
    path.write_bytes(bytes(2 * LENGTH))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 2 * LENGTH)
    write = RankStatus._write

    def noted(place: RankStatus, *since) -> None:
        at = f" at step {place.step}, position {place.position}," if place.step else ""
        note = f"{at} in phase {place.phase}, {place.what}".encode()[:LENGTH].ljust(LENGTH, b"\0")
        memory[:LENGTH] = note
        write(place, *since)
        memory[LENGTH:] = note

    RankStatus._write = noted
    cli.main()


if __name__ == "__main__":
    given = sys.argv[1]
    sys.argv[1:] = sys.argv[2:]
    main(
        Path(given),
        next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ),
    )
