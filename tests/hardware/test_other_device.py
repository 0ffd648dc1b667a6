"""A step on a device that isn't the CPU.

Nothing of the CPU's is mixed in, and nothing is read back but the numbers of a step.

torch's meta device has shapes only. It refuses a tensor of the CPU's beside its own, as CUDA does,
and to be read at all: whoever asked a tensor for a number within a step would make the host wait
for a GPU. Experts read how many rows go where, and aren't here.
"""

import pytest
from conftest import LONG

KINDS = {
    "dense": (),
    "bf16": ("precision.compute=bf16", "optimizer.moments=bf16", "model.tied=false"),
    "fp16": ("precision.compute=fp16", "optimizer.name=sgd"),
    "fp8": ("precision.compute=fp8",),
    "muon": ("optimizer.name=muon",),
    "selective": ("memory.recompute=selective", "model.family=qwen3"),
    "full": ("memory.recompute=full",),
    "offload": ("memory.offload=all",),
    "further tokens": ("model.mtp=2",),
    "segments": ("pipeline.schedule=seq1f1b",),
    "documents": ("data.documents=separate",),
}
SIMILAR = "dense", "selective", "fp16", "segments"  # what others do, and more


@pytest.mark.mpi
@pytest.mark.sizes(1)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[LONG] * (kind in SIMILAR)) for kind in KINDS])
def test_a_step_stays_on_the_device(world, kind):
    import torch
    from training import resolved

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.step_totals import Measure
    from mpitrain.model.families.catalog import plan_of

    class Shapes(Measure):
        def numbers(self, tensors):
            return [1.0 for each in tensors if each.is_meta]

        def squares(self, grads):
            return [1.0 for each in grads if each.is_meta]

        def count(self, targets):
            return sum(each.numel() for each in targets)

    if world.size > 1:
        pytest.skip("runs on 1 rank")
    config = resolved(world, "parallel.dp=1", "batch.micro=4", "model.layers=2", *KINDS[kind])
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("meta"), measure=Shapes())
    rows = torch.zeros(config.batch.global_, 17, dtype=torch.int64, device="meta")
    results = [
        actor.run_step(step, actor.cutter.cut(rows, 7 if kind == "documents" else None), 1e-3)
        for step in (1, 2)
    ]
    mesh.free()
    assert all(result.num_tokens == 8 * 16 and result.loss > 0 and not result.skipped for result in results)


def test_the_device_refuses_what_cuda_refuses():
    import torch

    x = torch.ones(3, device="meta")
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: x @ torch.ones(3),
        lambda: x.sum().item(),
        lambda: bool((x > 0).all()),
        x.tolist,
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wrong()
