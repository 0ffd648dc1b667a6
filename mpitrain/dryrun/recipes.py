"""The recipes of all ranks, for ranks without torch: another process rehearses them."""

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from mpitrain.cluster.launch import launched, rank_of_launcher
from mpitrain.cluster.processes import no_more, used
from mpitrain.cluster.status_board import RankStatus
from mpitrain.comm.base.interpreter import python
from mpitrain.comm.base.launchers import without_launcher
from mpitrain.config import Config
from mpitrain.errors import MpitrainError, counted
from mpitrain.inputs import os_errors_as

if TYPE_CHECKING:
    import subprocess

REHEARSAL = "from mpitrain.actor.rehearsal import main; main()"
LOOK_S = 0.25


class Rehearsals:
    """The process, of rank 0.

    Where a launcher says who that is, it loads torch while the ranks come together.
    What it writes goes to a file without a name: it never waits for its reader.
    """

    def __init__(self):
        self._process = self._started() if launched() and rank_of_launcher()[0] == 0 else None

    def _started(self) -> "subprocess.Popen":
        import subprocess
        import tempfile  # on one rank only: with it come random, shutil and their libraries

        environment = without_launcher(os.environ)  # it is no rank
        # read when it has ended
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        streams = {"stdin": subprocess.PIPE, "stdout": self._out, "stderr": self._said}
        what = "the process that rehearses the ranks could not be started"
        with os_errors_as(MpitrainError, what, no_more()):
            return subprocess.Popen(python("-c", REHEARSAL), env=environment, **streams)

    def begin(self, config: Config) -> None:
        """Let it rehearse the ranks of a resolved configuration."""
        self._process = self._process or self._started()
        try:
            self._process.stdin.write(msgspec.json.encode(config))
            self._process.stdin.close()
        except BrokenPipeError:
            return  # it has ended: recipes() tells why

    def recipes(self, num_ranks: int, place: RankStatus) -> list[bytes]:
        """Return what decodes to the recipe of each rank, when the process has ended.

        Meanwhile this rank is stuck if the process is.
        """
        with place.at("build", "rehearsing the ranks"):
            code = self._ended(place)
        for stream in (self._out, self._said):
            stream.seek(0)
        lines = self._out.read().splitlines()
        if code or len(lines) != num_ranks:
            ended = f"the rehearsal ended with exit code {code}, after {counted(len(lines), 'ranks')}"
            raise RuntimeError(f"{ended}:\n{self._said.read().decode()}")
        return lines

    def _ended(self, place: RankStatus) -> int:
        """Return the exit code; until then, note for the watchdog that the process does something."""
        import subprocess

        seen = used(self._process.pid)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(LOOK_S)
            before = seen
            seen = used(self._process.pid)
            if seen != before:
                place.enter(place.phase, place.what, place.state)
