"""The checkpoint that a run resumes from, the newest whole one: each rank verifies a part of it."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.comm.base.world import World
from mpitrain.errors import CheckpointError

VERIFYING = "verifying the newest checkpoint"


class Newest(NamedTuple):
    """The checkpoint to resume from: its step, 0 if there is none.

    data: digest of the tokens it was trained on. routing: of experts.replay; "" if nothing was
    replayed, and in older ones.
    order: name of the data's order; empty in older ones.
    damaged: later steps, which were passed over.
    config: the configuration that it was saved with, TOML.
    sequences: of the data's order that come before its next step; 0 in older ones.
    folder: in which it lies.
    """

    step: int = 0
    data: str = ""
    routing: str = ""
    order: str = ""
    damaged: tuple[int, ...] = ()
    config: str = ""
    sequences: int = 0
    folder: Path = Path()


def newest_whole(
    world: World,
    folder: Path,
    share: float,
    needs: Mapping[str, Any],
    warn: Callable[[str], object],
    note: Callable[[str], object],
    among: Callable[[int], bool] = lambda step: True,
) -> Newest:
    """Return the newest step in `folder` that no rank finds damaged. Collective over all ranks.

    folder: of this rank; in memory each node has its own, with the same steps.
    share: of the chunks of a step that are read, taken by chance, by some rank each.
    needs: arrays that it must have, with dtypes and shapes.
    warn: hears why a step is passed over, on every rank.
    note: called with what is read next.
    among: tells which steps count.

    Raises CheckpointError, alike on all ranks, where there are steps and none can be used.
    """
    # with it comes h5py: most of what is refused is refused before
    from mpitrain.checkpoint import load
    from mpitrain.checkpoint.folders import find, step_of
    from mpitrain.checkpoint.verify import VerifiedShare

    def look() -> tuple[str, list[str]]:
        return secrets.token_hex(8), [path.name for step, path in find(folder).items() if among(step)]

    seed, names = world.on_first_rank("looking for checkpoints", look)
    committed = [folder / name for name in names]
    part = VerifiedShare(share, world.rank, world.size, seed)
    damaged = list[int]()

    def judge(path: Path) -> Newest:
        newest = Newest()
        damage = ""
        try:
            step, meta, config = load.verified(path, part, needs, note)
            routing, order = meta.get("routing", ""), meta.get("order", "")
            sequences = meta.get("sequences", 0)
            newest = Newest(step, meta["data"], routing, order, config=config, sequences=sequences)
        except CheckpointError as error:
            damage = error.args[0]
        if first := world.first_of(VERIFYING, damage):
            damaged.append(step_of(path))
            raise CheckpointError(first)
        return newest

    newest = world.on_every_rank(VERIFYING, lambda: load.newest_of(folder, committed, judge, warn))
    return (newest or Newest())._replace(damaged=tuple(damaged), folder=folder)
