"""The recipes of all ranks, for ranks without torch: another process rehearses them."""

import os
import subprocess
import sys

import msgspec

from mpitrain.cluster.launch import launched, rank_of_launcher
from mpitrain.config import Config

OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_")  # a process that isn't a rank doesn't need to know
REHEARSAL = "from mpitrain.actor.rehearsal import main; main()"


class Rehearsals:
    """The process, of rank 0. Where a launcher says who that is, it loads torch while the ranks come together."""

    def __init__(self):
        self._process = self._started() if launched() and rank_of_launcher()[0] == 0 else None

    def _started(self) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", REHEARSAL], env=environment, **pipes)

    def recipes(self, config: Config, num_ranks: int) -> list[bytes]:
        """Return what decodes to the recipe of each rank, which ends the process. config: resolved."""
        process = self._process or self._started()
        found, said = process.communicate(msgspec.json.encode(config))
        lines = found.splitlines()
        if process.returncode or len(lines) != num_ranks:
            raise RuntimeError(f"the rehearsal ended with exit code {process.returncode}, after {len(lines)} ranks:\n{said.decode()}")
        return lines
