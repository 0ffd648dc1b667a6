"""Ranks that believe to see GPUs: what torch says of them is planted, and they compute on the CPU all the same.

    GPUS='{"name": ..., "memory_gib": ..., "architecture": ..., "vendor": ..., "seen": [["a", "b"], ["b"]], "used": FILE}'

seen: the identities that each rank sees, by index; the first list again for ranks that have none.  used: a line for each time that a thread
makes a GPU its own. Commands as in tests/several.py.
"""

import json
import os
import sys
import threading
from pathlib import Path

import several

from mpitrain.training.machine import gpus

PLANTED = json.loads(os.environ.get("GPUS", "null"))


def of_torch() -> gpus.Gpus:
    """Say what was planted for this rank."""
    rank = int(next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ))
    facts = [PLANTED[key] for key in ("name", "memory_gib", "architecture")]
    seen = PLANTED["seen"][rank] if rank < len(PLANTED["seen"]) else PLANTED["seen"][0]

    def use(index: int) -> None:
        with open(PLANTED["used"], "a", encoding="ascii") as file:
            file.write(f"{rank} {index} {threading.current_thread().name}\n")

    found = tuple(gpus.Gpu(facts[0], identity, int(facts[1] * 2**30), facts[2]) for identity in seen)
    return gpus.Gpus(PLANTED["vendor"] if found else None, found, "550.54.15", use, kind="cpu")


if __name__ == "__main__":
    gpus.of_torch = of_torch
    several.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
