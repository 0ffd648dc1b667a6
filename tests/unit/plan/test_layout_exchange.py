"""What is left open until links between nodes are known follows from bytes and seconds.

When weights are fetched, how long the tail is.
"""

from contextlib import nullcontext

import pytest

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.division.domains import gather_of
from mpitrain.plan.predict.link_choices import Machine, axes_between, choose, exchanged, left_open, took
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.plan.settings.resolve import resolve
from mpitrain.plan.settings.rule_table import idle_settings

LAYERS = 4
WIDTH = 64
FFN = 128
VOCAB = 256
SEQUENCE = 64
BATCH = 16
SETTINGS = (
    f"model.layers={LAYERS}", f"model.width={WIDTH}", "model.heads=4", "model.kv_heads=4",
    f"model.ffn={FFN}", f"model.vocab={VOCAB}",
    "model.tied=false", f"data.sequence={SEQUENCE}", f"batch.global={BATCH}", "batch.micro=1",
)  # fmt: skip
ONCE = "parallel.zero=3", "parallel.reduce=step"
# that multiply: the embedding is looked up
MATRICES = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * FFN) + VOCAB * WIDTH
FLOPS = 6 * MATRICES * SEQUENCE * BATCH / 2  # of a step and rank, attention's few not counted


def planned(*more, ranks=2):
    """Return the plan on as many nodes as ranks."""
    return plan_of(resolve(settings.load(None, (*SETTINGS, *more)), JobRanks(ranks, ranks, 1), VOCAB))


def choice(*more, link, flops=1e12, fits=lambda _: True, ranks=2):
    """Return the keys that are chosen, and what is said.

    link: bytes/s of each axis.
    fits: whether a plan does.
    """
    plan = planned(*more, ranks=ranks)
    machine = Machine(dict.fromkeys(axes_between(plan), link), flops)
    found, why = choose(plan, machine, fits)
    return gather_of(found.config.parallel), found.config.pipeline.tail or 1, why


def test_seconds_are_bytes_over_the_links_of_their_axis_and_flops_at_half_of_the_peak():
    plan = planned("parallel.zero=3", "parallel.dp_shard=2", ranks=4)
    found = exchanged(plan, 0)
    took_ = took(plan, Machine({"shard": 1e9, "replicate": 1e6}, 1e12))
    assert (
        found.weights["shard"]
        and found.gradients["shard"]
        and found.gradients["replicate"]
        and not found.weights["replicate"]
    )
    assert took_.weights == pytest.approx(found.weights["shard"] / 1e9)
    assert took_.gradients == pytest.approx(
        found.gradients["shard"] / 1e9 + found.gradients["replicate"] / 1e6
    )
    assert FLOPS / 2 / 0.5e12 < took_.computing < 1.2 * FLOPS / 2 / 0.5e12


def test_the_pipeline_rank_that_exchanges_most_counts():
    plan = planned(
        "parallel.zero=1", "parallel.pp=2", "model.vocab=100000", "pipeline.stages=[3, 1]", ranks=4
    )
    every = [sum(exchanged(plan, rank).gradients.values()) for rank in range(2)]
    assert every[0] != every[1]
    assert took(plan, Machine({"shard": 1e9, "replicate": 1e9}, 1e12)).gradients == pytest.approx(
        max(every) / 1e9
    )


def test_weights_are_kept_over_the_step_where_fetching_them_takes_longer_than_computing_and_they_fit():
    plan = planned("parallel.zero=3")
    found = exchanged(plan, 0)
    computing = took(plan, Machine({"shard": 1.0}, 1e12)).computing
    enough = (found.weights["shard"] + found.gradients["shard"]) / computing  # bytes/s
    assert choice("parallel.zero=3", link=1.01 * enough)[0] == "use"
    slow, _, why = choice("parallel.zero=3", link=0.99 * enough)
    assert slow == "step" and "fetched once" in why, why
    kept, _, why = choice("parallel.zero=3", link=0.99 * enough, fits=lambda _: False)
    assert kept == "use" and "don't fit into memory" in why, why


def test_what_was_asked_for_stays():
    for gather in ("use", "step"):
        assert choice("parallel.zero=3", f"parallel.gather={gather}", link=1.0)[0] == gather
        assert choice(*ONCE, f"parallel.gather={gather}", "pipeline.tail=3", link=1e15)[:2] == (gather, 3)


def test_the_tail_is_as_long_as_reductions_take_twice():
    plan = planned("parallel.zero=1")
    gradients = exchanged(plan, 0).gradients["shard"]
    backward = 2 / 3 * took(plan, Machine({"shard": 1.0}, 1e12)).computing / (BATCH / 2)
    for share, tail in ((0.4, 1), (0.6, 2), (1.1, 3), (1.6, 4), (50, 4)):
        assert choice("parallel.zero=1", link=gradients / (share * backward))[1] == tail, share
    # these weights are fetched once for all of its backwards
    assert choice(*ONCE, "parallel.gather=use", link=1e15)[1] == 4
    assert choice(*ONCE, "parallel.gather=step", link=1e15)[1] == 1
    # each microbatch is reduced: there is no tail
    assert choice("parallel.zero=3", "parallel.gather=use", link=1e15)[1] == 1
    assert choice("parallel.zero=1", "batch.global=4", link=1.0)[1] == 2  # there are no more


def test_nothing_is_open_where_all_was_said_or_one_node_has_all():
    gather = "parallel.gather"
    tail = "pipeline.tail"
    for more, keys in (
        ((*ONCE, "parallel.gather=use", "pipeline.tail=1"), ()),
        ((*ONCE, "pipeline.tail=1"), (gather,)),
        (("parallel.zero=1", "pipeline.tail=1"), ()),
        (("parallel.zero=1",), (tail,)),
        (ONCE, (gather, tail)),
        (("parallel.zero=3",), (gather,)),
        (("parallel.dp=1", "parallel.pp=2"), ()),  # nothing travels between data ranks
    ):
        assert left_open(planned(*more)) == keys, more


@pytest.mark.parametrize("more", [
    ("pipeline.schedule=seq1f1b",),  # a backward waits for that of the next segment
    ("pipeline.schedule=interleaved", "pipeline.chunks=2"),
    ("pipeline.schedule=zbv",),  # two stages on a rank
    ("parallel.zero=2", "parallel.reduce=microbatch"),
    ("parallel.zero=3", "parallel.reduce=microbatch", "parallel.gather=use"),
    ("parallel.pp=2",),
])  # fmt: skip
def test_no_tail_is_reported_where_none_is_walked(more):
    plan = planned("parallel.dp=2", *more, ranks=4 if "parallel.pp=2" in more else 2)
    assert left_open(plan) == ()
    several = plan.training.table.num_stages > 1
    with (
        pytest.raises(ConfigError, match=r"pipeline\.tail = 4 does nothing with")
        if several
        else nullcontext()
    ):
        longer = planned("parallel.dp=2", "pipeline.tail=4", *more, ranks=4 if "parallel.pp=2" in more else 2)
        assert longer.training.ranks == plan.training.ranks


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_the_tail_is_as_long_as_fits(most):
    _, tail, why = choice("parallel.zero=1", link=1.0, fits=lambda plan: plan.config.pipeline.tail <= most)
    assert tail == most and ("4 don't fit into memory" in why) == (most < 4), why


def test_what_changes_nothing_makes_no_other_programs():
    for batch, changes in ((2, False), (4, True)):  # of one microbatch there is no tail
        plan = planned(*ONCE, f"batch.global={batch}")
        found, _ = choose(plan, Machine(dict.fromkeys(axes_between(plan), 1e15), 1e12), lambda _: True)
        assert (found is not plan) == changes


def test_until_links_are_measured_one_microbatch_is_walked_and_held():
    """On whatever number of nodes: what a GPU is asked to hold is no guess."""
    assert (
        planned("parallel.zero=1").training.ranks
        == planned("parallel.zero=1", "pipeline.tail=1").training.ranks
    )
    assert (
        planned("parallel.zero=1").training.ranks
        != planned("parallel.zero=1", "pipeline.tail=2").training.ranks
    )


def test_a_key_that_a_run_wrote_down_is_no_choice_of_its_user():
    """config.toml of a run before has parallel.gather = "use", whatever ZeRO it was of."""
    plan = planned("parallel.zero=1", "parallel.gather=use")
    assert plan.config.parallel.gather == "use"
    assert idle_settings(plan.config) == [
        'parallel.gather = "use" does nothing with parallel.zero = 1: weights are whole'
    ]
    assert not idle_settings(planned("parallel.zero=3", "parallel.gather=use").config) + idle_settings(
        planned("parallel.zero=1").config
    )


def test_a_size_of_buckets_that_zero_3_doesnt_have_is_said_to_do_nothing():
    """The same one, so that stages of ZeRO can be compared; each block is a bucket then, whatever
    the size.
    """
    sized, plain = (planned("parallel.zero=3", *more) for more in (["comm.bucket_mb=0.5"], []))
    assert sized.training.ranks == plain.training.ranks and not idle_settings(plain.config)
    assert "comm.bucket_mb = 0.5 does nothing with parallel.zero = 3" in idle_settings(sized.config)[0]
    assert not idle_settings(planned("parallel.zero=2", "comm.bucket_mb=0.5").config)
