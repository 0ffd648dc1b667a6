"""`mpitrain supervise`: start a run again at once, in the same allocation, until it is done.

What a rank's death has cost is the step under way where recovery.every keeps copies in memory, and
the steps since the newest checkpoint where it doesn't.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpitrain import config as settings
from mpitrain.cluster import unhealthy_nodes
from mpitrain.cluster.processes import signal_when_parent_ends
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.unhealthy_nodes import SPARES
from mpitrain.commands.job import again
from mpitrain.commands.job.spare_nodes import SpareNodes
from mpitrain.errors import BAD_INPUT, FAILED, STOPPED_EARLY, CheckpointError, ConfigError
from mpitrain.inputs import os_errors_as, printable, shown

FORWARDED = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


class _Launches:
    """The starts of a command. Within the block it hears the signals that end a run, also between two starts.

    asked: the last of them, 0 for none.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Launches":
        # SIGINT the terminal sends to the ranks, too
        heard = {signal.SIGINT: self._note, **dict.fromkeys(FORWARDED, self._forward)}
        self._before = {number: signal.signal(number, handler) for number, handler in heard.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], nodes: SpareNodes | None) -> int:
        """Start it; return its exit code, 128 and the signal's number if one has ended it."""
        environment = {**os.environ, SPARES: str(nodes.num_spare if nodes else 0)}
        command = nodes.command(command) if nodes else command
        # a supervisor that is killed leaves nothing running
        ends = partial(signal_when_parent_ends, signal.SIGTERM)
        with os_errors_as(ConfigError, shown(command[0]), "give a command, such as mpirun -n 2 mpitrain run"):
            self._process = subprocess.Popen(command, env=environment, preexec_fn=ends)
        if self.asked in FORWARDED:  # while it was started
            self._process.send_signal(self.asked)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: object) -> None:
        self._note(number, frame)
        if self._process is not None:  # one that has ended gets none
            self._process.send_signal(number)

    def _note(self, number: int, frame: object) -> None:
        self.asked = number


def spare_nodes(
    count: int, ranks_per_node: int, config: str | None, overrides: tuple[str, ...]
) -> SpareNodes:
    """Return the nodes of this allocation, of which a run uses `count`. Raises ConfigError."""
    return SpareNodes(count, ranks_per_node, settings.load(config, overrides).recovery.shrink)


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

    It isn't started again after bad input, nor where somebody asked it to leave. A run that left
    for others in place of a slow node is.
    """
    with _Launches() as launches:
        _leaves_out(nodes, config, overrides, say)
        while True:
            code = launches.run(command, nodes)
            if launches.asked or code == BAD_INPUT:
                return code
            if not _leaves_out(nodes, config, overrides, say) and code == STOPPED_EARLY:
                return code
            verdict, why = again.main(code, config, overrides, most)
            say(f"mpitrain supervise: {why}")
            if verdict != again.AGAIN:
                return FAILED if verdict == again.UNFINISHED else code
            if nodes and _lacks_nodes(nodes, say):
                return code or FAILED
            if launches.asked:
                say(f"mpitrain supervise: asked to leave ({signal.Signals(launches.asked).name}): not again")
                return code or FAILED


def _leaves_out(
    nodes: SpareNodes | None, config: str | None, overrides: tuple[str, ...], say: Callable[[str], None]
) -> bool:
    """Exclude nodes that the run has found to err or be slow; return whether there are new ones."""
    if nodes is None:
        return False
    rundir = RunDir(settings.load(config, overrides).run.dir)
    with os_errors_as(CheckpointError, shown(rundir.unhealthy), "remove it"):
        excluded = nodes.exclude_unhealthy(unhealthy_nodes.noted(rundir))
    if excluded:
        say(f"mpitrain supervise: {printable(excluded)}")
    return bool(excluded)


def _lacks_nodes(nodes: SpareNodes, say: Callable[[str], None]) -> bool:
    """Exclude nodes that were lost, and return whether too few are left; say both."""
    for line in filter(None, (nodes.exclude_lost(), lack := nodes.lack())):
        say(f"mpitrain supervise: {line}")
    return bool(lack)
