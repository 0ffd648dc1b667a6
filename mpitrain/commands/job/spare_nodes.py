"""The nodes of a Slurm allocation that is larger than a run: the others are spares.

4 nodes, 1 of them spare   srun --nodes=3 --ntasks=12 --nodelist=a,b,c mpitrain run ...
b is lost                  every node is asked for `true`; b doesn't answer, and is excluded
the next start             srun --nodes=3 --ntasks=12 --nodelist=a,c,d mpitrain run ...
c is lost, too             no spare is left; with recovery.shrink the next start has 2 nodes, and a
                           later one as many as answer then, 3 at most
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown

ANSWER_S = 30.0  # in which a node has to answer
NODES = "SLURM_JOB_NODELIST"


class SpareNodes:
    """Chooses `count` nodes of this allocation, each for so many ranks.

    excluded: those that were lost, err or are slow.
    shrinks: whether fewer do, where no others are left.
    """

    def __init__(self, count: int, ranks_per_node: int, shrinks: bool = False):
        self._count = count
        self._ranks_per_node = ranks_per_node
        self._shrinks = shrinks
        self._names = _names_of(os.environ.get(NODES, ""))
        self.excluded: list[str] = []
        self._lost: list[str] = []
        if len(self._names) < count:
            raise ConfigError(
                f"--nodes {count}: found {counted(len(self._names), 'nodes')} in this job ({NODES}), "
                "needed as many or more; ask for --nodes and --spare together by mpitrain job slurm"
            )

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command of srun for nodes that aren't excluded. Raises ConfigError for no srun."""
        launcher, *words = command
        if os.path.basename(launcher) != "srun":
            raise ConfigError(f"COMMAND begins with {shown(launcher)}, needed is srun with --nodes")
        nodes = self._usable()[: self._count]
        ranks = len(nodes) * self._ranks_per_node
        placed = f"--nodes={len(nodes)}", f"--ntasks={ranks}", f"--nodelist={','.join(nodes)}"
        return [launcher, *placed, *words]

    def exclude_lost(self) -> str:
        """Exclude the nodes that don't answer; return what is to be said of it.

        Where a run shrinks, those that were lost are asked again.
        """
        again = self._lost if self._shrinks else []
        asked = {name: _asked(name) for name in (*self._usable(), *again)}
        end = time.monotonic() + ANSWER_S
        lost = [name for name, process in asked.items() if not _answers(process, end)]
        self.excluded = [name for name in self.excluded if name not in again] + lost
        self._lost = lost
        return f"excluded {', '.join(lost)}, without an answer within {ANSWER_S:.0f} s" if lost else ""

    def exclude_unhealthy(self, why_of_nodes: Mapping[str, str]) -> str:
        """Exclude nodes that err or are slow, while there are others; return what is to be said of it."""
        left = self._usable()
        unhealthy = [name for name in left if name in why_of_nodes][: max(0, len(left) - self._count)]
        self.excluded += unhealthy
        return "; ".join(f"excluded {name}: {why_of_nodes[name]}" for name in unhealthy)

    @property
    def num_spare(self) -> int:
        """How many nodes can take the place of others."""
        return max(0, len(self._usable()) - self._count)

    def lack(self) -> str:
        """Say so if fewer nodes are left than are needed."""
        left = self._usable()
        if len(left) >= self._count or (self._shrinks and left):
            return ""
        return f"{self._count} nodes are needed, and {len(left)} answer: the queue has to give others"

    def _usable(self) -> list[str]:
        return [name for name in self._names if name not in self.excluded]


def _names_of(nodes: str) -> list[str]:
    """Return the names of a list of Slurm's, such as node[1-3]."""
    if not nodes:
        return []
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{NODES} = {shown(nodes)}: scontrol doesn't say which nodes: {error}") from None
    return done.stdout.split()


def _asked(name: str) -> subprocess.Popen[bytes]:
    command = ["srun", "--mpi=none", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "true"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


def _answers(process: subprocess.Popen[bytes], end: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, end - time.monotonic())) == 0
    process.kill()
    process.wait()
    return False
