"""Copies that differ are named, and a step computed twice tells who computed something else.

Where nothing is wrong, nothing is said.
"""

import itertools
import os

import pytest
from conftest import LONG, agree
from training import resolved, train

# settings, and how many ranks have a copy of what is flipped on rank 1: the first weights of its
# first bucket
MIXTRAL = (
    "model.family=mixtral", "experts.count=4", "experts.active=2", "experts.balance=global",
    "parallel.ep=2", "parallel.dp=4",
)  # fmt: skip
LAYOUTS = {
    "dp": (("parallel.dp=4", "parallel.zero=0"), 4),
    "zero-1": (("parallel.dp=4", "parallel.zero=1"), 4),
    "zero-3": (("parallel.dp=4", "parallel.zero=3", "parallel.dp_shard=2"), 2),
    "tp": (("parallel.tp=2", "parallel.dp=2"), 0),
    "pp": (("parallel.pp=2", "parallel.dp=2", "model.tied=true"), 0),
    "dualpipe": (("parallel.pp=4", "pipeline.schedule=dualpipe", "model.layers=8"), 2),
    "cp": (("parallel.cp=2", "parallel.dp=2", "parallel.zero=2", "optimizer.moments=bf16"), 4),
    "ep": (MIXTRAL, 0),
    "bias": (
        (
            "model.family=mixtral",
            "experts.count=4",
            "experts.active=2",
            "experts.balance=bias",
            "parallel.ep=4",
            "parallel.dp=4",
        ),
        0,
    ),
    "muon": (("optimizer.name=muon", "parallel.tp=2", "parallel.dp=2", "parallel.pp=1"), 0),
    "bf16": (("precision.compute=bf16", "parallel.dp=4", "parallel.zero=2", "parallel.reduce=microbatch"), 4),
}

SIMILAR = "bf16", "cp", "pp", "muon", "zero-1", "dualpipe", "ep"  # others have copies where these have


def everyone(world):
    from mpitrain.comm.base.world import NULL_REPORTER, World

    return World(world, NULL_REPORTER)


def flip(x) -> None:
    """Flip the lowest bit of the first number of a tensor."""
    import torch

    x.detach().flatten()[:1].view(torch.uint8)[0] ^= 1


@pytest.mark.few_cases(3)
@pytest.mark.mpi(min_size=4)
@pytest.mark.sizes(4)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[LONG] * (name in SIMILAR)) for name in LAYOUTS])
def test_a_bit_flipped_in_one_copy_is_named_and_none_otherwise(world, name):
    from mpitrain.training.checks.replicas import different

    settings, copies = LAYOUTS[name]
    found = []

    def look(actor) -> None:
        found.append(different(actor, everyone(world)))
        if copies:
            if world.rank == 1:
                bucket = next(iter(actor.stages.values())).state.buckets[0].weights
                flip(actor.gradients.pieces[0].weight if bucket.whole is None else bucket.whole)
            found.append(different(actor, everyone(world)))

    train(world, resolved(world, *settings), look)
    agree(world, found[0] == ("", ()), found[0])
    node = os.uname().nodename
    text, nodes = found[-1]
    if copies > 2:
        agree(world, f"rank 1 on {node} is not that of the other {copies - 1}" in text, text)
        agree(world, "rank 0" not in text and text.startswith(("weights/", "master/")), text)
        agree(world, nodes == (node,), nodes)
    elif copies:
        agree(world, "rank 1 on " in text and "no other copy shows which is right" in text, text)
        agree(world, nodes == (), nodes)


def twice(world, settings, *, faults=(), of_rank=1, stop=lambda: 0):
    """Run a step twice; in the passes `faults` a bit of the first gradient that is reduced on one
    rank is flipped.

    stop: how urgently this rank has to leave. Return the verdict, the number of passes, and the weights.
    """
    import numpy as np
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.step_work import StepRequests
    from mpitrain.cluster.status_board import RankStatus
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.training.checks.rerun import RecomputeCheck

    config = resolved(world, *settings)
    plan = plan_of(config)
    place = RankStatus(world.rank)
    mesh = build_mesh(plan, world, place)
    actor = Actor(plan, mesh, torch.device("cpu"), place=place)
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (config.batch.global_, 17)))
    microbatches = actor.cutter.cut(rows.chunk(config.parallel.dp)[mesh["dp"].rank])
    checked = RecomputeCheck(actor, everyone(world))
    reduce = actor._handlers["REDUCE"]
    passes = []

    def run_counted(compute):
        def planted():
            passes.append(True)
            return compute()

        return checked(planted)

    def reduced(action, work):
        if world.rank == of_rank and passes and len(passes) in faults:
            gradient = actor.stages[action.stage].state.buckets[action.index].gradients[0]
            value = gradient.whole.flatten()[:1].view(torch.int32)
            value ^= 1 << (20 + len(passes))  # another bit each time
            passes_done.append(len(passes))
        reduce(action, work)

    passes_done = []
    actor._handlers["REDUCE"] = reduced
    asked = StepRequests(stop)
    actor.run_step(1, microbatches, 1e-2, asked=asked, pass_runner=run_counted)
    weights = [piece.weight.clone() for piece in actor.gradients.pieces]
    mesh.free()
    return checked.verdict, len(passes), weights


@pytest.mark.mpi(min_size=4)
@pytest.mark.sizes(4)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("parallel.dp=2", "parallel.tp=2"), marks=LONG),
        ("parallel.pp=2", "parallel.dp=2", "parallel.zero=3"),
        pytest.param(("parallel.pp=4", "pipeline.schedule=zbv", "model.layers=8"), marks=LONG),
        pytest.param(MIXTRAL, marks=LONG),
    ],
)
def test_a_step_computed_twice_is_the_same_and_one_wrong_pass_is_found(world, settings):
    # gradients that no other rank has are reduced by no operation: their norm is what is sent first
    first = "REDUCE" if any("parallel.dp=" in setting for setting in settings) else "NORM"
    clean, passes, weights = twice(world, settings)
    agree(world, (clean.text, clean.persistent, passes) == ("", False, 2), clean)
    for wrong in (1, 2):
        verdict, passes, corrected = twice(world, settings, faults=(wrong,), of_rank=2)
        agree(world, passes == 3 and "transient" in verdict.text and not verdict.persistent, verdict)
        agree(
            world,
            f"rank 2 on {os.uname().nodename}, in {first}" in verdict.text and "rank 1" not in verdict.text,
            verdict,
        )
        agree(
            world,
            all((a == b).all() for a, b in zip(weights, corrected)),
            "the update was made with the wrong pass",
        )


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_a_request_to_leave_between_two_passes_is_no_corruption(world):
    verdict, passes, _ = twice(world, ("parallel.dp=2",), stop=itertools.count().__next__)
    agree(world, (verdict.text, passes) == ("", 2), verdict)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_a_rank_that_computes_otherwise_each_time_is_persistent(world):
    verdict, passes, _ = twice(world, ("parallel.dp=2",), faults=(1, 2, 3))
    agree(
        world,
        passes == 3 and verdict.persistent and "persistent" in verdict.text and "rank 1 on" in verdict.text,
        verdict,
    )
