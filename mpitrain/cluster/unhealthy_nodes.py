"""Nodes that err or are slow, as a run has found them: unhealthy.jsonl of its run directory, a line a node.

`mpitrain supervise` starts the run on others, and gives it the number of spare nodes (SPARES).
"""

import json
import os
import time
from collections.abc import Iterable, Mapping

from mpitrain.cluster.rundir import RunDir, require_own
from mpitrain.inputs import append_lines, read_regular

SPARES = "MPITRAIN_SPARE_NODES"
MOST_BYTES = 1 << 20


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return this node's name: Slurm's, by which srun can leave it out, or else the system's."""
    return environment.get("SLURMD_NODENAME") or os.uname().nodename


def num_spares(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many nodes can take the place of others; 0 without `mpitrain supervise --nodes`."""
    number = environment.get(SPARES, "")
    return int(number) if number.isdecimal() else 0


def note(rundir: RunDir, step: int, nodes: Iterable[str], why: str) -> None:
    """Add nodes to unhealthy.jsonl. Raises OSError."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    lines = [{"time": now, "step": step, "node": node, "why": why} for node in nodes]
    append_lines(rundir.unhealthy, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def noted(rundir: RunDir) -> dict[str, str]:
    """Return why each node is in unhealthy.jsonl; a damaged line is none. Raises OSError."""
    try:
        require_own(rundir.path)
        lines = read_regular(rundir.unhealthy, MOST_BYTES).splitlines()
    except FileNotFoundError:
        return {}
    found = {}
    for line in lines:
        try:
            node, why = (json.loads(line)[key] for key in ("node", "why"))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(node, str) and isinstance(why, str):
            found[node] = why
    return found
