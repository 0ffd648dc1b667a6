"""Ranks that run several commands of mpitrain, one after the other.

Torch is loaded and MPI started once for all of them.

    mpirun -n 2 python command_sequence.py FOLDER '[["run", "--set", ...], ["run", ...]]'

What command 3 says goes to FOLDER/3, of all ranks together, and each rank's exit code to a line of
FOLDER/3.codes. Everything else is as when a user starts it: the command line, the guard and its
watchdog, the run directory. A rank that fails ends all, as always.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from mpitrain import cli
from mpitrain.cluster import guard
from mpitrain.cluster.status_board import LEFT
from mpitrain.comm.base.world import finalize


def leave(self: guard.Guard, code: int) -> None:
    """Leave a command with its exit code, but not MPI.

    Its watchdog goes, and nothing limits the time of what comes then.
    """
    self.place.enter("end", "leaving", LEFT)
    self.place.name("a rank between two commands", float("inf"))
    self.watchdog.joined = False  # so that its end isn't a watchdog that was killed
    if self.watchdog.connection is not None:
        self.watchdog.connection.shutdown(socket.SHUT_RDWR)


def main(
    folder: Path, commands: list[list[str]], before: Callable[[int], None] = lambda number: None
) -> None:
    """Run the commands. before: what changes the program for the command of that number."""
    guard.Guard.leave = leave
    for number, command in enumerate(commands):
        with open(folder / str(number), "ab", 0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.argv[1:] = command
        before(number)
        try:
            cli.main()
        except SystemExit as ended:
            with open(folder / f"{number}.codes", "a", encoding="ascii") as codes:
                codes.write(f"{ended.code}\n")
    finalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
