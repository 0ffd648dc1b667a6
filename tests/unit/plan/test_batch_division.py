"""Which microbatches each data rank has, and that all of them are summed in one tree, whoever sums them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.division.batch_division import BatchDivision, SubtreeSums, sequences_of
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step_model import of_microbatch
from mpitrain.plan.settings.resolve import resolve

SIZES = st.tuples(st.integers(0, 8), st.integers(0, 20), st.integers(1, 40)).filter(
    lambda size: 1 << size[0] >= size[2]
)


def tree(begin, end):
    """Return the tree over groups as nested pairs, from its top."""
    middle = (begin + end) // 2
    return begin if end - begin == 1 else (tree(begin, middle), tree(middle, end))


def pair(earlier, later):
    """Return the sum of two subtrees, as what it is a sum of."""
    return earlier, later


def divided(size):
    """Return the division of 2**power groups of an odd number of microbatches, and that number."""
    power, half, num_ranks = size
    odd = 2 * half + 1
    return BatchDivision(odd << power, num_ranks, in_tree=True), odd


@given(SIZES)
def test_all_ranks_together_sum_the_tree_of_one_rank(size):
    division, odd = divided(size)
    seen, over_ranks = [], SubtreeSums(pair)
    for rank in range(division.num_ranks):
        run = division.run(rank)
        seen += run.leaves
        mine, held = SubtreeSums(pair), 0
        for first in range(0, len(run.leaves), odd):
            (group,) = {run.group_of(first + place) for place in range(odd)}
            assert [*group] == [*run.leaves[first : first + odd]]
            held = max(held, len(mine.sums) + 1)
            mine.add(group, group.start // odd)
        assert mine.subtrees == run.subtrees and len(run.subtrees) <= division.most_subtrees
        assert held == run.most_held <= division.run(division.rank_of_most_sums).most_held
        for subtree, value in zip(run.subtrees, mine.sums):
            over_ranks.add(subtree, value)
    assert seen == [*range(division.num_microbatches)]
    assert over_ranks.sums == [tree(0, division.num_microbatches // odd)]


@given(SIZES)
def test_runs_are_of_about_one_length_and_never_empty(size):
    division, odd = divided(size)
    lengths = [len(division.run(rank).leaves) for rank in range(division.num_ranks)]
    share = division.num_microbatches / odd / division.num_ranks
    assert division.is_possible and 1 <= min(lengths) <= max(lengths) == division.longest
    assert max(lengths) / odd <= max(-(-share // 1), 1.25 * share)
    empty = [division.run(rank).is_empty(division.longest - 1) for rank in range(division.num_ranks)]
    assert empty == [length < max(lengths) for length in lengths]


@given(st.integers(0, 5), st.integers(1, 40))
def test_a_power_of_2_of_ranks_has_one_subtree_each(power, each):
    division = BatchDivision(each << power, 1 << power, in_tree=True)
    assert division.is_even and division.most_subtrees == 1
    assert {len(division.run(rank).leaves) for rank in range(1 << power)} == {each}


@pytest.mark.parametrize(
    ("num_leaves", "num_ranks", "numbers", "subtrees"),
    [
        (8, 4, "2", 1),
        (8, 3, "2 to 3", 2),
        (12, 3, "3 to 6", 1),
        (64, 3, "20 to 24", 3),
        (480, 3, "150 to 180", 3),
    ],
)
def test_subtrees_that_ranks_send(num_leaves, num_ranks, numbers, subtrees):
    division = BatchDivision(num_leaves, num_ranks, in_tree=True)
    assert (division.numbers, division.most_subtrees) == (numbers, subtrees)


def resolved(num_ranks, *keys):
    return resolve(settings.load(None, ("numerics.reproducible=layout", *keys)), num_ranks, 256)


def test_sequences_of_unequal_ranks_are_the_steps_in_order():
    config = resolved(3, "parallel.dp=3", "batch.global=16", "batch.micro=2")
    assert [sequences_of(config, rank) for rank in range(3)] == [range(0, 6), range(6, 12), range(12, 16)]


@pytest.mark.parametrize(("num_ranks", "size", "longest"), [(3, 12, 6), (3, 8, 3), (4, 8, 2)])
def test_a_step_is_predicted_with_the_longest_run(num_ranks, size, longest):
    config = resolved(num_ranks, f"parallel.dp={num_ranks}", f"batch.global={size}", "batch.micro=1")
    layout = layout_of(config, machine_of(find_machine("laptop")))
    assert layout.num_microbatches == longest == plan_of(config).num_microbatches
    assert of_microbatch(layout).num_microbatches == 1


@pytest.mark.parametrize(
    ("num_ranks", "keys", "against"),
    [
        (6, ["parallel.dp=3", "parallel.tp=2"], "parallel.tp = 2"),
        (6, ["parallel.dp=3", "parallel.cp=2"], "parallel.cp = 2"),
        (
            3,
            ["parallel.dp=3", "parallel.zero=0", "run.noise_scale=true"],
            "parallel.zero = 0, run.noise_scale",
        ),
        (6, ["parallel.dp=6", "parallel.dp_shard=2"], "parallel.dp_shard = 2"),
        (6, ["parallel.dp=3", "pipeline.schedule=dualpipe"], 'pipeline.schedule = "dualpipe"'),
    ],
)
def test_what_takes_one_sum_of_each_rank_is_refused(num_ranks, keys, against):
    with pytest.raises(ConfigError, match="several sums of gradients") as error:
        resolved(num_ranks, "batch.global=24", "batch.micro=1", *keys)
    assert against in str(error.value)


@pytest.mark.parametrize("size", [2, 6, 15])
def test_a_rank_without_a_group_of_microbatches_is_refused(size):
    with pytest.raises(ConfigError, match=r"doesn't divide into microbatches.*use a multiple of 4"):
        resolved(3, "parallel.dp=3", f"batch.global={size}", "batch.micro=1")


@pytest.mark.parametrize("num_ranks", [3, 5, 7])
def test_a_batch_that_was_left_open_has_a_group_for_each_rank(num_ranks):
    config = resolved(num_ranks, f"parallel.dp={num_ranks}", "batch.micro=1")
    assert config.batch.global_ >= 24 and all(sequences_of(config, rank) for rank in range(num_ranks))


def test_without_a_tree_all_ranks_have_as_many():
    with pytest.raises(ConfigError, match="doesn't divide into microbatches"):
        resolve(settings.load(None, ("parallel.dp=3", "batch.global=8", "batch.micro=1")), 3, 256)
