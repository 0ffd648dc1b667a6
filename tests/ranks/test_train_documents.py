"""Separate documents in a step: joined ones are untouched, masked steps are harmless, and documents
matter.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from conftest import EVERY, agree

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]
SETTINGS = (
    "model.layers=4",
    "model.width=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=64",
    "data.sequence=16",
    "batch.global=16",
    f"batch.micro={1 if EVERY else 4}",
    "comm.timeout_s=200",
)
END = 0
LAYOUTS = {
    1: ("parallel.dp=1",),
    2: ("parallel.pp=2",),
    4: ("parallel.tp=2", "parallel.cp=2"),
    8: ("parallel.pp=4", "parallel.dp=2"),
}


@contextmanager
def actor_of(world, *settings):
    """Yield an actor of the layout for this number of ranks, and a function from rows to this
    rank's microbatches.
    """
    import torch

    from mpitrain import config
    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    if world.size not in LAYOUTS:
        pytest.skip("1, 2, 4 and 8 ranks tell")
    resolved = resolve(config.load(None, (*SETTINGS, *LAYOUTS[world.size], *settings)), world.size, 256)
    plan = plan_of(resolved)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    yield actor, lambda rows, ends: actor.cutter.cut(rows.chunk(resolved.parallel.dp)[mesh["dp"].rank], ends)
    mesh.free()


def rows_of(seed):
    import torch

    return torch.randint(END + 1, 256, (16, 17), generator=torch.Generator().manual_seed(seed))


def weights_of(actor):
    return [piece.weight.clone() for piece in actor.gradients.pieces]


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_in_which_nothing_carries_loss_is_skipped(world, precision):
    """And the next step trains as if it hadn't been, with the same loss scale."""
    import torch

    with actor_of(world, f"precision.compute={precision}") as (actor, cut):
        before = weights_of(actor)
        scale = actor.loss_scale.state
        nothing = actor.run_step(1, cut(torch.full_like(rows_of(1), END), END), 1e-2)
        kept = all(a.equal(b) for a, b in zip(before, weights_of(actor))) and actor.loss_scale.state == scale
        loss, count, _ = actor.evaluate(1, cut(torch.full_like(rows_of(1), END), END))
        some = actor.run_step(2, cut(rows_of(1), END), 1e-2)
    with actor_of(world, f"precision.compute={precision}") as (actor, cut):
        alone = actor.run_step(1, cut(rows_of(1), END), 1e-2)
    facts = (nothing.skipped, nothing.num_tokens, nothing.loss != nothing.loss, kept, loss, count)
    agree(world, facts == (True, 0, True, True, 0.0, 0.0), f"{facts}")
    agree(
        world,
        (some.loss, some.grad_norm, some.num_tokens) == (alone.loss, alone.grad_norm, 256),
        f"{some}, {alone}",
    )


def test_joined_documents_are_cut_as_if_there_were_none(world):
    """No documents, every target: what attention and loss then do is what they always did."""
    import torch

    rows = rows_of(1)
    rows[:, ::3] = END
    with actor_of(world) as (actor, cut):
        microbatches = cut(rows, None)
        local = rows.chunk(actor.config.parallel.dp)[actor.mesh["dp"].rank]
        right = [m.documents is None for m in microbatches]
        positions = actor.cutter.positions
        for name, shift, read in (("tokens", 0, actor.cutter.first), ("targets", 1, actor.cutter.last)):
            found = [getattr(m, name) for m in microbatches]
            right.append(
                torch.cat(found).equal(local[:, positions + shift]) if read else set(found) == {None}
            )
    agree(world, all(right), f"{right}")


def test_rows_without_an_end_train_alike_joined_and_separate(world):
    with actor_of(world, "precision.compute=fp64") as (actor, cut):
        (joined, count, _), (separate, same, _) = (
            actor.evaluate(0, cut(rows_of(1), ends)) for ends in (None, END)
        )
    agree(
        world,
        count == same and abs(joined - separate) < 1e-10 * joined,
        f"{joined} and {separate} over {count} and {same}",
    )


def after(microbatch, positions):
    """Leave out the loss of positions before 9."""
    targets = microbatch.targets
    return replace(microbatch, targets=None if targets is None else targets.masked_fill(positions < 9, -1))


def test_what_stands_before_a_document_does_not_matter_to_it(world):
    """Other tokens before an end of text leave the losses after it alone, if documents are
    separate, and change them if not.
    """
    one = rows_of(1)
    other = rows_of(2)
    other[:, 9:] = one[:, 9:]
    one[:, 8] = other[:, 8] = END
    with actor_of(world, "precision.compute=fp64") as (actor, cut):
        different = {}
        for ends in (END, None):
            losses = []
            for rows in (one, other):
                microbatches = [after(each, actor.cutter.positions) for each in cut(rows, ends)]
                losses.append(actor.evaluate(0, microbatches)[0])
            different[ends] = abs(losses[0] - losses[1]) / losses[0]
    agree(world, different[END] < 1e-12 and different[None] > 1e-6, f"{different}")
