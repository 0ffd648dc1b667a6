"""Every schedule, written as a table and read back from a file, trains to the bits of its name.

So do PyTorch's own tables, and orders that are searched for at random sizes, times and limits:
MPITRAIN_EFFORT=N tries N of 60.
"""

import random

import pytest
from conftest import EVERY, agree, but_for
from effort import numbers
from test_train_schedules import OTHER_ORDER, SETTINGS, train
from torch_tables import FORMATS, tables, torch_table

pytestmark = pytest.mark.mpi(min_size=2)

CHUNKS = 3  # at most
SEARCHED = ("plain-auto", "interleaved-auto", "v-auto", "zb-auto", "zbv-auto", "auto")


def config_of(world, schedule, num_microbatches, *extra):
    """A table says its own ranks, stages and microbatches; a name is told them."""
    from mpitrain import config as settings
    from mpitrain.plan.settings.resolve import resolve

    sizes = (f"model.layers={CHUNKS * world.size}", f"pipeline.schedule={schedule}", *extra)
    if not schedule.endswith((".txt", ".csv")):
        sizes += (f"parallel.pp={world.size}", f"batch.global={num_microbatches}")
    return resolve(settings.load(None, (*SETTINGS, *sizes)), world.size, 256)


def written(world, path, text):
    """Write a file on rank 0, and return its path on all ranks once it is there."""
    path = world.bcast(str(path))
    if world.rank == 0:
        with open(path, "w") as file:
            file.write(text)
    world.barrier()
    return path


def differing(found, expected):
    """Return what differs between two trainings: losses, norms, weights."""
    weights = [name for name, weight in expected[1].items() if not weight.equal(found[1][name])]
    wrong = [f"weights {weights[:3]}"] if weights else []
    wrong += [f"losses {found[0]} for {expected[0]}"] if found[0] != expected[0] else []
    return wrong + ([f"in flight {found[2]}"] if found[2][0] != found[2][1] else [])


def halves(one, other):
    """Return (form, half of the cases) to train.

    Tables that are equal train alike, so that each form trains the other half.
    """
    return [(one, 0), (other, 1), *([(one, 1), (other, 0)] if EVERY else [])]


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("form", "half"), but_for(halves("txt", "csv"), [("csv", 1)]))
def test_a_schedule_written_as_a_table_trains_to_the_bits_of_its_name(world, tmp_path, form, half):
    from support.quick_schedules import NAMES

    from mpitrain.commands.requests import ScheduleRequest
    from mpitrain.commands.schedule.command import answer
    from mpitrain.plan.settings.pipeline_table import table_of

    if world.size > 4 and not EVERY:
        pytest.skip("2 and 4 ranks tell")
    m = 2 * world.size
    wrong = []
    expected = {}
    for name in list(NAMES)[half::2]:
        path = world.bcast(str(tmp_path / f"{name}.{form}"))
        if world.rank == 0:
            answer(ScheduleRequest(name=name, stages=world.size, microbatches=m, table=path, json=True))
        world.barrier()
        by_name = config_of(world, name, m)
        by_table = config_of(world, path, m)
        if (
            table_of(by_table).ranks != table_of(by_name).ranks
            or by_table.pipeline.chunks != by_name.pipeline.chunks
        ):
            wrong.append(
                f"{name}: another table, or {by_table.pipeline.chunks} chunks for {by_name.pipeline.chunks}"
            )
        key = name if name in OTHER_ORDER else "1f1b"
        expected[key] = expected.get(key) or train(world, config_of(world, key, m), num_steps=1)
        wrong += [f"{name}: {what}" for what in differing(train(world, by_table, num_steps=1), expected[key])]
    agree(world, not wrong, "; ".join(wrong))


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("form", "half"), halves(*FORMATS))
def test_pytorchs_tables_train_to_the_bits_of_ours(world, tmp_path, form, half):
    """Of 1 to 3 stages a rank, in loops and Vs, with its messages and without."""
    if world.size > 4 and not EVERY:
        pytest.skip("2 and 4 ranks tell")
    m = 2 * world.size
    wrong = []
    expected = train(world, config_of(world, "1f1b", m), num_steps=1)
    for number, (key, text) in enumerate(list(tables(world.size, m, form, CHUNKS).items())[half::2]):
        config = config_of(world, written(world, tmp_path / f"{number}.csv", text), m)
        wrong += [f"{key}: {what}" for what in differing(train(world, config, num_steps=1), expected)]
    agree(world, not wrong, "; ".join(wrong))


def searched(seed, num_ranks):
    """Return (name, table) of an order that is searched for, at random times and with a random limit."""
    from mpitrain.schedules import catalog
    from mpitrain.schedules.auto_choice import AUTO, fastest
    from mpitrain.schedules.options import Options, Times

    chance = random.Random(seed)
    name, m = SEARCHED[seed % len(SEARCHED)], chance.randint(1, 2 * num_ranks)
    limit = chance.randint(2, 4 * num_ranks) / 2
    times = Times(*(chance.randint(1, 9) for _ in range(3)), chance.choice((0, 1)))
    chunks = chance.randint(1, CHUNKS) if name in catalog.LOOPED else None
    options = Options(chunks, times=times, memory_limit=limit, weight_memory=chance.choice((1, 0.5)))
    options = options._replace(recompute=chance.choice((None, 0.05)))
    if name == AUTO:
        return name, fastest(num_ranks, m, options).table
    return name, catalog.build(name, num_ranks, m, options.only(catalog.FAMILIES[name].takes))


@pytest.mark.few_ranks
def test_orders_that_are_searched_for_train_to_the_same_bits(world, tmp_path):
    from mpitrain.schedules.table import write_table

    wrong, expected = [], {}
    for seed in numbers(range(2), 60):
        name, table = searched(seed, world.size) if world.rank == 0 else (None, None)
        name, table = world.bcast((name, table))
        m = table.num_microbatches
        expected[m] = expected.get(m) or train(world, config_of(world, "1f1b", m), num_steps=1)
        path = written(world, tmp_path / f"{seed}.txt", write_table(table))
        found = train(world, config_of(world, path, m), num_steps=1)
        wrong += [f"{seed}, {name}: {what}" for what in differing(found, expected[m])]
    agree(world, not wrong, "; ".join(wrong))


def test_pytorchs_older_letters_train(world, tmp_path):
    """What its own test folder holds: B for inputs beside W, p = 2."""
    if world.size != 2:
        pytest.skip("2 ranks")
    text = torch_table("InterleavedZeroBubble", 2, 8, 2).replace("I", "B")
    found = train(world, config_of(world, written(world, tmp_path / "old.csv", text), 8), num_steps=1)
    wrong = differing(found, train(world, config_of(world, "interleaved-zb", 8), num_steps=1))
    agree(world, not wrong, "; ".join(wrong))


# placements that no name has: consecutive stages on one rank, ranks upside down, a V that begins on
# the other side
ODD = {
    "blocks": "rank 0: F0@0 F0@1 F1@0 F1@1 B0@1 B0@0 B1@1 B1@0\nrank 1: F0@2 F0@3 B0@3 B0@2 F1@2 F1@3 B1@3 "
    "B1@2",
    "reversed": "rank 0: F0@1 B0@1 F1@1 B1@1\nrank 1: F0@0 F1@0 B0@0 B1@0",
    "inner": "rank 0: F0@1 F0@2 B0@2 B0@1 F1@1 F1@2 B1@2 B1@1\nrank 1: F0@0 F1@0 F0@3 B0@3 B0@0 F1@3 B1@3 "
    "B1@0",
    "three": "rank 0: F0@0 F0@2 F0@3 B0@3 B0@2 B0@0 F1@0 F1@2 F1@3 B1@3 B1@2 B1@0\n"
    "rank 1: F0@1 F0@4 F0@5 B0@5 B0@4 B0@1 F1@1 F1@4 F1@5 B1@5 B1@4 B1@1",
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("more", [("model.tied=true",), ("parallel.zero=3",), ("model.mtp=1",)])
def test_any_placement_trains_to_the_same_bits(world, tmp_path, case, more):
    if world.size != 2:
        pytest.skip("2 ranks")
    expected = train(world, config_of(world, "1f1b", 2, *more), num_steps=1)
    found = train(
        world, config_of(world, written(world, tmp_path / "odd.txt", ODD[case]), 2, *more), num_steps=1
    )
    wrong = differing(found, expected)
    agree(world, not wrong, "; ".join(wrong))
