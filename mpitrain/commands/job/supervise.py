"""`mpitrain supervise`: start a run again at once, in the same allocation, until it is done.

What a rank's death has cost is the step under way where recovery.every keeps copies in memory, and
the steps since the newest checkpoint where it doesn't.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress

from mpitrain import config as settings
from mpitrain.cluster import unhealthy_nodes
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.unhealthy_nodes import SPARES
from mpitrain.commands.job import again
from mpitrain.commands.job.spare_nodes import SpareNodes
from mpitrain.errors import BAD_INPUT, FAILED, STOPPED_EARLY, CheckpointError, ConfigError
from mpitrain.inputs import shown

FORWARDED = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


class _Launch:
    """A start of the command, which hears the signals that end a run. asked: one of them came."""

    def __init__(self, command: Sequence[str], num_spares: int):
        environment = {**os.environ, SPARES: str(num_spares)}
        try:
            self._process = subprocess.Popen(command, env=environment)
        except OSError as error:
            what = f"{shown(command[0])}: {error.strerror}"
            raise ConfigError(f"{what}; give a command, such as mpirun -n 2 mpitrain run") from None
        self.asked = False

    def wait(self) -> int:
        """Return its exit code, 128 and the signal's number if one has ended it."""
        before = {number: signal.signal(number, self._forward) for number in FORWARDED}
        # the terminal sends it to the ranks, too
        before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        try:
            code = self._process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: object) -> None:
        self._note(number, frame)
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _note(self, number: int, frame: object) -> None:
        self.asked = True


def main(
    command: Sequence[str],
    config: str | None,
    overrides: tuple[str, ...],
    most: int,
    say: Callable[[str], None],
    nodes: SpareNodes | None = None,
) -> int:
    """Start `command` until its run is done; return the exit code of the last start, 1 for a false 0.

    config, overrides: of the run that it starts.  say: prints a line.
    nodes: of an allocation with spares; srun starts `command` on some that answer.

    It isn't started again after bad input, nor where somebody asked it to leave. A run that left for
    others in place of a slow node is.
    """
    while True:
        launch = _Launch(nodes.command(command), nodes.num_spare) if nodes else _Launch(command, 0)
        code = launch.wait()
        if launch.asked or code == BAD_INPUT:
            return code
        unhealthy = nodes.exclude_unhealthy(_unhealthy_nodes(config, overrides)) if nodes else ""
        if unhealthy:
            say(f"mpitrain supervise: {unhealthy}")
        elif code == STOPPED_EARLY:
            return code
        verdict, why = again.main(code, config, overrides, most)
        say(f"mpitrain supervise: {why}")
        if verdict != again.AGAIN:
            return FAILED if verdict == again.UNFINISHED else code
        if nodes and _lacks_nodes(nodes, say):
            return code or FAILED


def _unhealthy_nodes(config: str | None, overrides: tuple[str, ...]) -> dict[str, str]:
    """Return why the run has left nodes, by their names."""
    rundir = RunDir(settings.load(config, overrides).run.dir)
    try:
        return unhealthy_nodes.noted(rundir)
    except OSError as error:
        raise CheckpointError(f"{shown(rundir.unhealthy)}: {error.strerror}; remove it") from None


def _lacks_nodes(nodes: SpareNodes, say: Callable[[str], None]) -> bool:
    """Exclude nodes that were lost, and return whether too few are left; say both."""
    for line in filter(None, (nodes.exclude_lost(), lack := nodes.lack())):
        say(f"mpitrain supervise: {line}")
    return bool(lack)
