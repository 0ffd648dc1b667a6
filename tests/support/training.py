"""What tests that train on several ranks share.

A small model, its training, and what to compare it with, made once for many tests.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import EVERY

STEPS = 3 if EVERY else 2  # the second is the first that finds other weights, and moments
SETTINGS = (
    "model.layers=4",
    "model.width=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=96",
    "data.sequence=16",
    "batch.global=8",
    "comm.bucket_mb=0.03",
    "comm.timeout_s=200",
)

_made: dict[object, Any] = {}


def once(world, key: object, make: Callable[[], Any]) -> Any:
    """Return make(), which rank 0 calls the first time that `key` is asked for.

    It is the same for all tests: leave it as it is.

    Collective over the whole world. A reference that every rank computed would take as many cores,
    and so would ranks that wait for it inside of MPI.
    """
    if key not in _made:
        made = make() if world.rank == 0 else None
        ready = world.Ibarrier()
        while not ready.Test():
            time.sleep(0.001)
        _made[key] = world.bcast(made)
    return _made[key]


def resolved(world, *settings):
    """Return the whole configuration.

    Microbatches are pairs of sequences where enough are left, unless `settings` say their size.
    """
    from mpitrain import config
    from mpitrain.plan.settings.resolve import resolve

    parsed = config.load(None, (*SETTINGS, *settings))
    parallel = parsed.parallel
    enough = parsed.batch.global_ // (parallel.dp or 1) >= 4 * (parallel.pp or 1)
    if enough and not EVERY and not any(word.startswith("batch.micro=") for word in settings):
        parsed = config.load(None, (*SETTINGS, *settings, "batch.micro=2"))
    needed = (parallel.dp or 1) * (parallel.pp or 1) * parallel.tp * parallel.cp
    if world.size != needed:
        pytest.skip(f"runs on {needed} ranks")
    return resolve(parsed, world.size, 256)


def train(world, config, look=lambda actor: None, device=None, before=lambda actor, microbatches: None):
    """Return losses and norms of some steps, a validation loss, and {parameter.

    weights}.
    device: the CPU, if not given.

    look, before: are called with the actor at the end, and before the first step.
    """
    import numpy as np
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.division.batch_division import sequences_of

    plan = plan_of(config)
    device = device or torch.device("cpu")
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, device)
    # fewer: documents are shorter
    tokens, separator = (30, 7) if config.data.documents == "separate" else (256, None)
    mine = sequences_of(config, mesh["dp"].rank)
    lines = []
    for step in range(1, STEPS + 1):
        rows = torch.from_numpy(np.random.default_rng(step).integers(0, tokens, (config.batch.global_, 17)))
        microbatches = actor.cutter.cut(rows[mine.start : mine.stop].to(device), separator)
        if step == 1:
            before(actor, microbatches)
        result = actor.run_step(step, microbatches, 1e-2)
        lines.append((result.loss, result.grad_norm))
    lines.append(actor.evaluate(STEPS, microbatches)[:2])
    look(actor)
    found = world.allgather(
        [
            ((p.spec.name, p.spec.offset, p.begin), p.weight.cpu().numpy().copy())
            for p in actor.gradients.counted
        ]
    )
    mesh.free()
    return lines, whole_weights(piece for part in found for piece in part)


def alone(world, *settings):
    """Train on one rank, once for all tests that ask for it. Collective over the whole world."""
    from mpi4py import MPI

    return once(world, ("alone", settings), lambda: train(MPI.COMM_SELF, resolved(MPI.COMM_SELF, *settings)))


def trained(world, *settings):
    """Train on all ranks, once for all tests that ask for it; the result is what alone() returns.

    Collective over the whole world.
    """
    key = "trained", settings
    if key not in _made:
        _made[key] = train(world, resolved(world, *settings))
    return _made[key]


def same(found, expected) -> bool:
    """Whether two runs have the same lines and weights, bit for bit."""
    return found[0] == expected[0] and all(
        (found[1][name] == expected[1][name]).all() for name in expected[1]
    )


def whole_weights(pieces):
    """Put flat pieces together in their order."""
    import numpy as np

    weights = {}
    for (name, offset, begin), data in sorted(pieces, key=lambda piece: piece[0]):
        weights.setdefault((name, offset), []).append((begin, data))
    for name, parts in weights.items():
        assert [begin for begin, _ in parts] == list(
            np.cumsum([0] + [len(data) for _, data in parts[:-1]])
        ), name
    return {name: np.concatenate([data for _, data in parts]) for name, parts in weights.items()}


def one_step(world, *settings):
    """Run a step; return what was predicted for this rank and for the one with the largest shard,
    and what was measured.
    """
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.memory import measure
    from mpitrain.actor.memory_meter import Watch
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.predict.memory import predict

    config = resolved(world, *settings)
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    shape = config.batch.global_, config.data.sequence + 1
    rows = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).chunk(config.parallel.dp)[
        mesh["dp"].rank
    ]
    watch = Watch(actor.stages.values(), actor.site.constants())
    actor.run_step(
        1, actor.cutter.cut(rows, 7 if config.data.documents == "separate" else None), 1e-3, watch=watch
    )
    predicted = [predict(plan, shards)[actor.pp.rank] for shards in (actor.shards_here, None)]
    measured = measure(actor, watch)
    mesh.free()
    return *predicted, measured


def recorded(mesh, run):
    """Run something; return what was started, and how many bytes were posted, by axis."""
    for axis in mesh.axes.values():
        axis.account.log = []
    before = {name: usage.num_bytes for name, usage in mesh.usage().items()}
    run()
    mesh.progress.drain()
    posted = {name: usage.num_bytes - before[name] for name, usage in mesh.usage().items()}
    return {
        name: axis.account.log for name, axis in mesh.axes.items() if axis.size > 1 and axis.account.log
    }, posted


def initial_weights(config):
    import torch

    from mpitrain.model.families.catalog import plan_of
    from mpitrain.parallel.zero.initial import normal

    specs = {spec.name: spec for spec in plan_of(config).parameters()}
    make = {
        name: normal(1, name, 0, s.numel, s.std).view(s.shape) if s.std else None for name, s in specs.items()
    }
    return {
        name: torch.ones(specs[name].shape, dtype=torch.float64) if w is None else w
        for name, w in make.items()
    }


def part(tensors, piece):
    """Return the part of a whole tensor that this rank's piece is: a run of elements of a box."""
    spec = piece.spec
    box = tensors[spec.name][
        tuple(slice(begin, begin + length) for begin, length in zip(spec.offset, spec.shape))
    ]
    return box.reshape(-1)[piece.begin : piece.end]


def of_tensors(predicted, held):
    """Return a prediction with what a look at the tensors between instructions doesn't see, or sees
    otherwise, as it was found.
    """
    return predicted._replace(recomputed=held.recomputed, working=held.working, messages=held.messages)
