"""Ranks that believe to see GPUs.

What torch says of them is planted, and they compute on the CPU all the same.

    GPUS='[{"name": ..., "memory_gib": ..., "architecture": ..., "vendor": ..., "seen": [["a", "b"],
        ["b"]], "used": FILE}, ...]'

One for each command, or one for all.
seen: the identities that each rank sees, by index; the first list again for ranks that have none.
used: a line for each time that a thread makes a GPU its own. Commands as in command_sequence.py.
"""

import json
import os
import sys
import threading
from pathlib import Path

import command_sequence

from mpitrain.training.machine import gpus


def plant(planted: dict[str, object]) -> None:
    """Have torch say this from now on."""

    def torch_gpus() -> gpus.Gpus:
        rank = int(
            next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
        )
        seen = planted["seen"][rank] if rank < len(planted["seen"]) else planted["seen"][0]

        def use(index: int) -> None:
            with open(planted["used"], "a", encoding="ascii") as file:
                file.write(f"{rank} {index} {threading.current_thread().name}\n")

        memory = int(planted["memory_gib"] * 2**30)
        found = tuple(
            gpus.Gpu(planted["name"], identity, memory, planted["architecture"]) for identity in seen
        )
        return gpus.Gpus(planted["vendor"] if found else None, found, "550.54.15", use, kind="cpu")

    gpus.torch_gpus = torch_gpus


if __name__ == "__main__":
    planted = json.loads(os.environ["GPUS"])
    command_sequence.main(
        Path(sys.argv[1]),
        json.loads(sys.argv[2]),
        before=lambda number: plant(planted[number % len(planted)]),
    )
