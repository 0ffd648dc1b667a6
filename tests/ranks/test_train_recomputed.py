"""Microbatches that a table recomputes (R) or offloads (O): bits, and memory to the byte."""

import pytest
from conftest import agree
from test_train_schedules import train
from test_train_tables import config_of, differing, written
from training import one_step, resolved

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.few_ranks]

KINDS = {"R": "BI", "O": "F"}  # what stands right after each
LAYOUTS = [
    ("1f1b", ()),
    ("zb-h1", ("parallel.zero=3",)),
    ("interleaved", ("parallel.reduce=microbatch",)),
    ("zbv", ("memory.offload=activations", "data.documents=separate")),
    ("zb-h1", ("memory.recompute=selective", "model.mtp=1")),
    ("1f1b", ("model.family=mixtral", "experts.count=4", "experts.active=2")),
    ("dualpipev", ("precision.compute=bf16",)),
]


def freed(name, kind, num_ranks, num_microbatches, every=2):
    """Return a schedule's table in which each `every`-th stash is recomputed, or offloaded."""
    from mpitrain.schedules.actions import PAIR, Action
    from mpitrain.schedules.catalog import build
    from mpitrain.schedules.pairs import grouped
    from mpitrain.schedules.table import make_table, write_table

    table = build(name, num_ranks, num_microbatches)
    rows = []
    for row in table.ranks:
        rows.append([])
        for group in grouped(row):
            for action in group:
                if (
                    action != PAIR
                    and action.kind in KINDS[kind]
                    and (action.index + action.stage) % every == 0
                ):
                    rows[-1].append(Action(kind, action.index, action.stage))
            rows[-1] += group
    return write_table(make_table(name, rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "more"), LAYOUTS)
def test_where_stashes_are_freed_bits_stay(world, tmp_path, name, more, kind):
    m = 2 * world.size
    more = [key for key in more if kind == "R" or "offload" not in key]
    text = freed(name, kind, world.size, m) if world.rank == 0 else None
    path = written(world, tmp_path / "again.txt", world.bcast(text))
    expected = train(world, config_of(world, name, m, *more))
    found = train(world, config_of(world, path, m, *more))
    wrong = differing(found, expected)
    agree(world, not wrong, f"{name} {more}: {wrong}")


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_what_such_a_step_holds_is_predicted_to_the_byte(world, tmp_path, name, kind, every):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    text = freed(name, kind, 2, 8, every) if world.rank == 0 else None
    path = written(world, tmp_path / "again.txt", world.bcast(text))
    model = ("model.layers=8", "model.width=64", "model.vocab=256", "data.sequence=64")
    keys = "parallel.pp=2", "batch.global=8", "batch.micro=1"
    held = []
    for schedule in (name, path):
        predicted, _, measured = one_step(world, *model, *keys, f"pipeline.schedule={schedule}")
        agree(
            world,
            predicted.activations == measured.activations,
            f"{schedule}: predicted {predicted.activations}, held {measured.activations}",
        )
        held.append(measured.activations)
    less = held[1] < held[0] if every == 1 else held[1] <= held[0]
    agree(world, world.rank != 0 or less, f"{name}: {held}")


@pytest.mark.parametrize(("kind", "key"), [("R", "recompute=0.05"), ("O", "offload=0.5")])
def test_auto_frees_stashes_only_if_that_is_allowed_and_shorter(world, kind, key):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    keys = "parallel.pp=2", "batch.global=8", "pipeline.schedule=auto", "model.layers=4"
    tight, allowed = (*keys, "pipeline.memory_limit=1"), f"pipeline.{key}"
    kept, again = (plan(world, *tight, *more) for more in ((), (allowed,)))
    roomy = plan(world, *keys, "pipeline.memory_limit=8", allowed)
    kinds = [[action.kind for row in one.table.ranks for action in row] for one in (kept, again, roomy)]
    counts = [found.count(kind) for found in kinds]
    assert counts[0] == counts[2] == 0 < counts[1]
    wrong = differing(train(world, again.config), train(world, kept.config))
    agree(world, not wrong, f"{wrong}")


def plan(world, *keys):
    from mpitrain.model.families.catalog import plan_of

    return plan_of(resolved(world, *keys))
