"""World.share: results in the order of the items, errors in their place, and every rank is let go."""

import time

import pytest
from conftest import agree

from mpitrain.comm.base.world import NULL_REPORTER, World
from mpitrain.errors import DataError, StoppedEarly

ITEMS = range(40)


@pytest.fixture
def share(world):
    """Share ITEMS on all ranks but one; return what rank 0 yields, and what each rank was given."""
    ranks = World(world, NULL_REPORTER, is_asked=lambda: world.rank == world.size - 1)
    given = []

    def help(item):
        given.append(item)
        if item == "first":
            return
        time.sleep(0.001 * (item * 7 % 5))
        if item == 20:
            raise DataError("item 20")
        yield item
        yield world.rank

    def run(items, each=lambda parts: None):
        given.clear()
        found = []

        def action():
            for parts in ranks.share(items, range(max(1, world.size - 1)), "first"):
                found.append(parts)
                each(ranks)

        try:
            ranks.on_first_rank("a test", action, help)
        except (DataError, StoppedEarly) as error:
            return found, list(given), error.args[0]
        return found, list(given), ""

    return run


@pytest.mark.mpi(min_size=1)
def test_results_come_in_the_order_of_the_items_from_all_ranks_that_take_part(world, share):
    items = [item for item in ITEMS if item != 20]
    found, given, error = share(items)
    every = world.allgather(given)
    agree(world, not error, error)
    agree(world, [item for item, _ in found] == items * (world.rank == 0), found)
    agree(world, sorted(item for some in every for item in some if item != "first") == items, every)
    agree(world, all(some[0] == "first" and len(some) > 1 for some in every[1:-1]), every)
    agree(world, world.size == 1 or every[-1] == [], every)


@pytest.mark.mpi(min_size=1)
def test_an_error_of_an_item_is_raised_in_its_place_on_all_ranks(world, share):
    found, _, error = share(ITEMS)
    agree(world, error == "item 20", error)
    agree(world, [item for item, _ in found] == list(range(20)) * (world.rank == 0), found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_rank_0_hears_who_was_asked_to_leave_and_can_stop_anywhere(world, share):
    def each(ranks):
        time.sleep(0.1)
        if ranks.beat():
            raise StoppedEarly("a test", "another rank was asked to leave")

    items = [item for item in range(200) if item != 20]
    found, _, error = share(items, each)
    agree(world, bool(error), error)
    agree(world, 0 < len(found) < 60 or world.rank > 0, len(found))
    agree(world, [item for item, _ in share(items)[0]] == items * (world.rank == 0))
