"""What is left open until links between nodes are known follows from bytes and seconds: when weights are fetched, how long the tail is."""

import pytest

from mpitrain import config as settings
from mpitrain.layout.exchange import Machine, axes_between, choose, exchanged, is_open, took
from mpitrain.layout.resolve import resolve
from mpitrain.model.families.catalog import plan_of

LAYERS, WIDTH, FFN, VOCAB, SEQUENCE, BATCH = 4, 64, 128, 256, 64, 16
SETTINGS = (
    f"model.layers={LAYERS}", f"model.width={WIDTH}", "model.heads=4", "model.kv_heads=4", f"model.ffn={FFN}", f"model.vocab={VOCAB}",
    "model.tied=false", f"data.sequence={SEQUENCE}", f"batch.global={BATCH}", "batch.micro=1",
)  # fmt: skip
MATRICES = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * FFN) + VOCAB * WIDTH  # that multiply: the embedding is looked up
FLOPS = 6 * MATRICES * SEQUENCE * BATCH / 2  # of a step and rank, attention's few not counted


def planned(*more, ranks=2):
    """Return the plan on as many nodes as ranks, and what was asked for."""
    asked = settings.load(None, (*SETTINGS, *more))
    return plan_of(resolve(asked, ranks, VOCAB, ranks, 1)), asked


def choice(*more, link, flops=1e12, fits=True, ranks=2):
    """Return the keys that are chosen, and what is said. link: bytes/s of each axis."""
    plan, asked = planned(*more, ranks=ranks)
    machine = Machine(dict.fromkeys(axes_between(plan), link), flops)
    found, why = choose(plan, asked, machine, lambda _: fits)
    return found.config.parallel.gather, found.config.pipeline.tail, why


def test_seconds_are_bytes_over_the_links_of_their_axis_and_flops_at_half_of_the_peak():
    plan, _ = planned("parallel.zero=3", "parallel.dp_shard=2", ranks=4)
    found = exchanged(plan, 0)
    took_ = took(plan, Machine({"shard": 1e9, "replicate": 1e6}, 1e12))
    assert found.weights["shard"] and found.gradients["shard"] and found.gradients["replicate"] and not found.weights["replicate"]
    assert took_.weights == pytest.approx(found.weights["shard"] / 1e9)
    assert took_.gradients == pytest.approx(found.gradients["shard"] / 1e9 + found.gradients["replicate"] / 1e6)
    assert FLOPS / 2 / 0.5e12 < took_.computing < 1.2 * FLOPS / 2 / 0.5e12


def test_the_pipeline_rank_that_exchanges_most_counts():
    plan, _ = planned("parallel.zero=1", "parallel.pp=2", "model.vocab=100000", "pipeline.stages=[3, 1]", ranks=4)
    every = [sum(exchanged(plan, rank).gradients.values()) for rank in range(2)]
    assert every[0] != every[1]
    assert took(plan, Machine({"shard": 1e9, "replicate": 1e9}, 1e12)).gradients == pytest.approx(max(every) / 1e9)


def test_weights_are_kept_over_the_step_where_fetching_them_takes_longer_than_computing_and_they_fit():
    plan, _ = planned("parallel.zero=3")
    found, computing = exchanged(plan, 0), took(plan, Machine({"shard": 1.0}, 1e12)).computing
    enough = (found.weights["shard"] + found.gradients["shard"]) / computing  # bytes/s
    assert choice("parallel.zero=3", link=1.01 * enough)[0] == "use"
    slow, _, why = choice("parallel.zero=3", link=0.99 * enough)
    assert slow == "step" and "fetched once" in why, why
    kept, _, why = choice("parallel.zero=3", link=0.99 * enough, fits=False)
    assert kept == "use" and "don't fit into memory" in why, why


def test_what_was_asked_for_stays():
    for gather in ("use", "step"):
        assert choice("parallel.zero=3", f"parallel.gather={gather}", link=1.0)[0] == gather
        assert choice("parallel.zero=3", f"parallel.gather={gather}", "pipeline.tail=3", link=1e15)[:2] == (gather, 3)


def test_the_tail_is_as_long_as_reductions_take_twice():
    plan, _ = planned("parallel.zero=1")
    gradients = exchanged(plan, 0).gradients["shard"]
    backward = 2 / 3 * took(plan, Machine({"shard": 1.0}, 1e12)).computing / (BATCH / 2)
    for share, tail in ((0.4, 1), (0.6, 2), (1.1, 3), (1.6, 4), (50, 4)):
        assert choice("parallel.zero=1", link=gradients / (share * backward))[1] == tail, share
    assert choice("parallel.zero=3", "parallel.gather=use", link=1e15)[1] == 4  # these weights are fetched once for all of its backwards
    assert choice("parallel.zero=3", "parallel.gather=step", link=1e15)[1] == 1
    assert choice("parallel.zero=1", "batch.global=4", link=1.0)[1] == 2  # there are no more


def test_nothing_is_open_where_all_was_said_or_one_node_has_all():
    for more, open_ in (
        (("parallel.zero=3", "parallel.gather=use", "pipeline.tail=1"), False),
        (("parallel.zero=3", "pipeline.tail=1"), True),
        (("parallel.zero=1", "pipeline.tail=1"), False),
        (("parallel.zero=1",), True),
        (("parallel.dp=1", "parallel.pp=2"), False),
    ):
        plan, asked = planned(*more)
        assert is_open(plan.config, asked) == open_, more
    asked = settings.load(None, (*SETTINGS, "parallel.zero=1"))
    assert not is_open(resolve(asked, 2, VOCAB), asked)


def test_a_key_that_a_run_wrote_down_is_no_choice_of_its_user():
    """config.toml of a run before has parallel.gather = "use", whatever ZeRO it was of."""
    plan, _ = planned("parallel.zero=1", "parallel.gather=use")
    assert plan.config.parallel.gather == "use"
