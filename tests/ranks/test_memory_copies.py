"""What sums of gradients hold besides the buffers is predicted to the byte: copies in 16 bits that are sent.

Three sums at most have one; without rounding, a sum arrives in its buffer.
"""

import pytest
from conftest import agree
from training import resolved

MODEL = ("model.layers=8", "model.width=64", "model.vocab=256", "data.sequence=64", "batch.global=8")
SMALL = "comm.bucket_mb=0.0625"  # so that there are more than three
LAYOUTS = [
    "parallel.zero=0 precision.reduce=bf16",
    "parallel.zero=1 precision.reduce=bf16",
    "parallel.zero=1",
    "parallel.zero=0 parallel.reduce=microbatch",
    "parallel.zero=1 parallel.reduce=microbatch precision.reduce=bf16",
    "parallel.zero=2",
    "parallel.zero=2 parallel.reduce=step precision.reduce=bf16",
    "parallel.zero=3",
    "parallel.zero=3 precision.compute=bf16 precision.reduce=bf16",
]


def arriving(world, settings):
    """Return what the sums of a step were to hold, and what they held at most."""
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.predict.rounded_copies import copies_sent

    config = resolved(world, *MODEL, SMALL, "parallel.dp=2", *settings.split())
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    shape = config.batch.global_ // 2, config.data.sequence + 1
    rows = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    actor.run_step(1, actor.cutter.cut(rows), 1e-3)
    mesh.free()
    return copies_sent(plan, 0), actor.gradients.most_bytes


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("settings", LAYOUTS)
def test_what_sums_hold_besides_their_buffers_is_predicted(world, settings):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    predicted, held = arriving(world, settings)
    none = "precision.reduce" not in settings
    agree(world, held == predicted and (held == 0) == none, f"{settings}: predicted {predicted}, held {held}")


def test_copies_of_gradients_do_not_grow_with_the_number_of_blocks():
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.predict.memory import predict
    from mpitrain.plan.settings.resolve import resolve

    def messages(layers, *more):
        given = "model.width=512", f"model.layers={layers}", "parallel.dp=4", "precision.reduce=bf16", *more
        return predict(plan_of(resolve(settings.load(None, given), 4, 256)))[0].messages

    for more in (("parallel.zero=1",), ("parallel.zero=2",), ("parallel.zero=3",)):
        assert messages(8, *more) == messages(32, *more) > messages(8, *more, "precision.reduce=same")
