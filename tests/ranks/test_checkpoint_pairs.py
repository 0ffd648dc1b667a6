"""Saved in one layout, read in another, saved again.

The same root digest; and training resumes with the same bits where axes promise it.

MPITRAIN_EFFORT=30 takes as many random pairs, by default there are a few. Each needs at most the
ranks of the lane.
"""

import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import digest_of, meta_of
from conftest import agree
from effort import numbers

from mpitrain import config
from mpitrain.errors import ConfigError
from mpitrain.plan.predict.snapshot_bytes import copy_bytes
from mpitrain.plan.settings.resolve import resolve

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.sizes(4)]

PAIRS = numbers(range(1), 30)
SETTINGS = (
    "model.layers=4", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.ffn=64",
    "data.sequence=16", "batch.global=8",
    "batch.micro=1", "comm.bucket_mb=0.03", "comm.timeout_s=200", "numerics.reproducible=layout",
)  # fmt: skip
MODELS = {
    "tied": ("model.tied=true",),
    "untied": ("model.tied=false",),
    "experts": ("model.family=mixtral", "experts.count=4", "model.tied=false"),
}


def draw(dice, model, size):
    """Draw a layout of at most `size` ranks: {axis: degree}, and settings."""
    while True:
        axes = {axis: dice.choice([1, 1, 2, 4]) for axis in ("dp", "pp", "tp", "cp")}
        axes["tp"] = min(axes["tp"], 2)  # key-value heads
        num_ranks = axes["dp"] * axes["pp"] * axes["tp"] * axes["cp"]
        if num_ranks > size or (num_ranks == 1 and dice.random() < 0.9):
            continue
        settings = [f"parallel.{axis}={degree}" for axis, degree in axes.items()]
        inside = axes["tp"] * axes["cp"] * axes["dp"]
        if model == "experts" and inside > 1:
            ep = dice.choice([n for n in (1, 2, 4) if inside % n == 0])
            settings.append(f"parallel.ep={ep}")
            if inside // ep > 1 and dice.random() < 0.5:
                settings.append("parallel.etp=2")
        zero = dice.choice([0, 1, 2, 3] if axes["dp"] * axes["cp"] > 1 else [0])
        settings.append(f"parallel.zero={zero}")
        if axes["pp"] > 1 and zero < 2 and dice.random() < 0.3:
            settings.append("pipeline.schedule=zbv" if axes["pp"] == 2 else "pipeline.schedule=zb-h1")
        with suppress(ConfigError):  # some of these don't fit together
            plan_for(num_ranks, (*MODELS[model], *settings))
            return num_ranks, axes, settings


def plan_for(num_ranks, settings):
    from mpitrain.model.families.catalog import plan_of

    return plan_of(resolve(config.load(None, (*SETTINGS, *settings)), num_ranks, 256))


class Ranks:
    """The first ranks of a world, with a layout on them; None of what it has on the others."""

    def __init__(self, world, num_ranks, settings):
        import torch

        from mpitrain.actor.actor import Actor
        from mpitrain.actor.communicators import build_mesh

        self.world = world
        self.here = world.rank < num_ranks
        self.groups = []
        self.comm = world.Split(0 if self.here else 1, world.rank)
        if self.here:
            plan = plan_for(num_ranks, settings)
            self.config, self.mesh = plan.config, build_mesh(plan, self.comm)
            self.actor = Actor(plan, self.mesh, torch.device("cpu"))

    def step(self, number):
        """Train a step on the tokens that it has in every layout; return loss and norm."""
        import numpy as np
        import torch

        if not self.here:
            return None
        batch = self.config.batch
        rows = torch.from_numpy(
            np.random.default_rng(number).integers(0, 256, (batch.global_, self.config.data.sequence + 1))
        )
        mine = rows.chunk(self.config.parallel.dp)[self.mesh["dp"].rank]
        result = self.actor.run_step(number, self.actor.cutter.cut(mine), 1e-2)
        return result.loss, result.grad_norm

    def save(self, folder, how):
        """Save, as the trainer's threads do, `copied` or `live`, or what two or `all` ranks have
        together in one file.

        Return the root digest on all ranks.
        """
        from mpitrain.checkpoint import save
        from mpitrain.training.saving import state_io

        tmp = save.begin(folder, 2) if self.world.rank == 0 else None
        tmp = self.world.bcast(tmp)
        if self.here:
            me = (
                (self.mesh["model"].rank, self.mesh["data"].rank)
                if state_io.has_a_shard(self.actor)
                else None
            )
            snapshot = state_io.Snapshot(self.actor, copied=how == "copied")
            if (
                me
                and not (self.actor.tp.rank or self.config.experts.count)
                and all(s.first for s in self.actor.zero_groups.values())
            ):
                predicted = copy_bytes(self.actor.plan, self.actor.pp.rank, self.actor.shards_here)
                assert predicted == snapshot.num_bytes, f"predicted {predicted}, copied {snapshot.num_bytes}"
            if how in ("two", "all"):
                snapshot = self.gathered(snapshot, self.comm.rank // 2 if how == "two" else 0)
                me = (self.comm.rank,) if snapshot.num_bytes else None
            writers = sorted(each for each in self.comm.allgather(me) if each)
            snapshot.take()
            if me:
                save.write_shard(tmp, writers.index(me), snapshot.parts())
        self.world.Barrier()
        if self.world.rank == 0:
            save.commit(tmp, meta_of(2) | {"loss_scale": list(self.actor.loss_scale.state)})
        self.world.Barrier()
        return digest_of(folder, 2)

    def gathered(self, snapshot, which):
        """Return what the ranks that have the same number `which` save together."""
        from mpitrain.comm.base.group import Group
        from mpitrain.comm.base.world import NULL_REPORTER
        from mpitrain.training.saving.gathered import Gathered

        comm = self.comm.Split(which, self.comm.rank)
        self.groups.append(comm)
        return Gathered(snapshot, Group(comm, NULL_REPORTER, "the first"))

    def read(self, folder):
        from mpitrain.checkpoint.load import open_step
        from mpitrain.training.saving import state_io

        if self.here:
            with open_step(folder, 2) as saved:
                state_io.read(saved, self.actor)
            self.actor.restored(2)

    def free(self):
        if self.here:
            self.mesh.free()
        for comm in (*self.groups, self.comm):
            comm.Free()


def require_one_file(folder):
    """Require that a step is in one file, each array in one piece."""
    from mpitrain.checkpoint.load import open_step

    with open_step(folder, 2) as saved:
        assert list(saved.shards) == ["shard-00000.h5"]
        assert [len(saved.array(name).pieces) for name in saved.names()] == [1] * len(saved.names())


@pytest.mark.parametrize("number", PAIRS)
def test_saved_read_and_saved_again_is_the_same(world, number):
    dice = random.Random(f"pair {number}")
    model = dice.choice(list(MODELS))
    (_, one, a), (_, other, b) = layouts = [draw(dice, model, world.size) for _ in range(2)]
    folder = Path(world.bcast(tempfile.mkdtemp(prefix="mpitrain-test-") if world.rank == 0 else None))
    first, second = (
        Ranks(world, num_ranks, (*MODELS[model], *settings)) for num_ranks, _, settings in layouts
    )
    for step in (1, 2):
        first.step(step)
    hows = dice.choice(["copied", "two", "all"]), dice.choice(["live", "two", "all"])
    digests = [first.save(folder / "first", hows[0])]
    second.read(folder / "first")
    digests.append(second.save(folder / "second", hows[1]))
    agree(world, digests[0] == digests[1], f"{model}, {a} to {b}, {hows}: {digests}")
    if world.rank == 0 and hows[1] == "all":
        require_one_file(folder / "second")
    lines = first.step(3), second.step(3)
    if world.rank == 0:
        # With tp, norms are summed over it before the data axis.
        same = (
            all(one[axis] == other[axis] for axis in ("tp", "cp", *(["dp"] if one["tp"] > 1 else [])))
            and model != "experts"
        )
        near = all(abs(x - y) <= limit * abs(x) for x, y, limit in zip(*lines, (1e-6, 1e-5)))
    agree(world, world.rank or (lines[0] == lines[1] if same else near), f"{model}, {a} to {b}: {lines}")
    first.free()
    second.free()
    if world.rank == 0:
        shutil.rmtree(folder)
