"""`memory.offload = "optimizer"`.

The bits of a run without, however the state is divided, and after a restart.
"""

import pytest
from conftest import EVERY, WITH_LONG, agree, but_for

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]

CHOICES = [
    (),
    ("optimizer.name=muon",),
    ("optimizer.name=sgd", "precision.compute=fp16"),
    ("optimizer.moments=bf16", "precision.compute=bf16"),
    ("memory.recompute=selective", "model.tied=false"),
]


LAYOUTS = {
    "dp=1": CHOICES,
    "dp=2": CHOICES,
    "pp=2": CHOICES,
    "dp=2 tp=2": CHOICES if EVERY else CHOICES[1:2],
    "dp=2 pp=2": CHOICES if EVERY or WITH_LONG else CHOICES[:1],
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("layout", "choice"),
    but_for(
        [(layout, choice) for layout, choices in LAYOUTS.items() for choice in choices],
        [("dp=2 tp=2", CHOICES[1])],
    ),
    ids=lambda each: each if isinstance(each, str) else ",".join(each) or "adamw",
)
def test_offloading_shows_in_no_bit(world, layout, choice, monkeypatch):
    from training import resolved, train

    from mpitrain.optim import offload

    monkeypatch.setattr(offload, "LOAD", 4096)  # so that there are several
    keys = ("batch.micro=4", "parallel.dp=1", *(f"parallel.{word}" for word in layout.split()), *choice)
    lines, weights = train(world, resolved(world, *keys))
    for number, zero in enumerate((0, 1, 2, 3) if "dp=2" in layout else (0,)):
        mode = ("optimizer", "all")[number % 2]
        loads = []
        config = resolved(
            world, *keys, f"parallel.zero={zero}", "parallel.reduce=step", f"memory.offload={mode}"
        )
        found = train(world, config, lambda actor, loads=loads: loads.append(actor.optimizer._loads))
        agree(world, found[0] == lines, f"zero={zero}: {found[0]} instead of {lines}")
        different = [name for name in weights if not (weights[name] == found[1][name]).all()]
        agree(world, found[1].keys() == weights.keys() and not different, f"zero={zero}: {different[:3]}")
        agree(world, (len(loads[0]) == 1) == ("optimizer.name=muon" in choice), f"{len(loads[0])} loads")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_was_saved_is_taken_over(world, name, monkeypatch):
    """State that was read into the pieces of an offloaded optimiser, and weights into host memory,
    get to where they are used.
    """
    import torch
    from training import resolved

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.optim import offload

    if world.size != 1:
        pytest.skip("runs on 1 rank")
    monkeypatch.setattr(offload, "LOAD", 4096)  # so that there are several
    rows = torch.randint(0, 256, (4, 16, 17), generator=torch.Generator().manual_seed(1))
    keys = (
        f"optimizer.name={name}",
        "optimizer.moments=bf16",
        "parallel.dp=1",
        "batch.global=16",
        "batch.micro=16",
    )
    device = torch.device("cpu")
    plan = plan_of(resolved(world, *keys))
    mesh = build_mesh(plan, world)
    modes = (plan_of(resolved(world, *keys, f"memory.offload={mode}")) for mode in ("none", "optimizer"))
    first, second = (Actor(each, mesh, device) for each in modes)
    assert (len(second.optimizer._loads) == 1) == (name == "muon")
    losses = [first.run_step(step, first.cutter.cut(rows[step]), 1e-2).loss for step in range(4)]
    first = Actor(plan, mesh, device)
    found = [first.run_step(step, first.cutter.cut(rows[step]), 1e-2).loss for step in range(2)]
    for one, other in zip(first.gradients.pieces, second.gradients.pieces):
        other.weight.copy_(one.weight)
        for (_, x), (_, y) in zip(first.optimizer.moments(one), second.optimizer.moments(other)):
            y.copy_(x)
    second.restored(2)
    found += [second.run_step(step, second.cutter.cut(rows[step]), 1e-2).loss for step in (2, 3)]
    mesh.free()
    assert found == losses


@pytest.mark.gpu
def test_a_gpu_computes_what_it_did_but_for_the_update(world):
    """AdamW's update on the host rounds as that on the GPU does, but for the last bits of a step."""
    import torch
    from training import resolved

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    if world.size != 1 or not torch.cuda.is_available():
        pytest.skip("runs on 1 rank with a GPU")
    rows = torch.randint(0, 256, (3, 16, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for mode in ("none", "optimizer", "all"):
        config = resolved(
            world,
            "parallel.dp=1",
            "batch.global=16",
            "batch.micro=4",
            "precision.compute=bf16",
            f"memory.offload={mode}",
        )
        plan = plan_of(config)
        mesh = build_mesh(plan, world)
        actor = Actor(plan, mesh, torch.device("cuda", 0))
        losses.append(
            [actor.run_step(step, actor.cutter.cut(rows[step].cuda()), 1e-2).loss for step in range(3)]
        )
        hosted = [
            p.weight.is_pinned() and not p.weight.is_cuda and p.grad.is_cuda for p in actor.gradients.pieces
        ]
        assert all(hosted) if mode != "none" else not any(hosted)
        mesh.free()
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-3) and found[0] == losses[0][0]
