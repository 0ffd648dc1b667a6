"""Each setting that claims to save memory does, in the prediction, over a grid of layouts.

Or `mpitrain memory` says that it doesn't.
"""

import itertools

import pytest
from conftest import EVERY, LONG, but_for

from mpitrain import config as settings
from mpitrain.commands.inspect import show_proof
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.promises import RECOMPUTE, ZERO, by_value, idle_here, idle_values, most_bytes
from mpitrain.plan.predict.speed_costs import costs
from mpitrain.plan.settings.resolve import resolve

MODELS = {
    "llama3-8b": ("model.preset=llama3-8b",),
    "llama3.2-1b": ("model.preset=llama3.2-1b",),  # tied, a fifth of its weights are the embedding
    "smollm2-135m": (  # which tp=2 divides
        *("model.preset=smollm2-135m", "model.heads=8", "model.kv_heads=4", "attention.head_width=72"),
    ),
    "mixtral": ("model.preset=mixtral-8x7b", "model.layers=6"),
    "reference": ("model.preset=reference",),
}
BF16 = "precision.compute=bf16"
LAYOUTS = {
    1: {"dp=2": 2, "dp=8": 8, "dp=4 tp=2": 8, "dp=2 cp=2": 4, "dp=8 dp_shard=4": 8},
    2: {
        f"dp={dp} pp=2 schedule={name}": 2 * dp
        for dp in (2, 4)
        for name in ("1f1b", "zb-h1", "zbv", "v-half", "interleaved")
    },
}
TABLE = {"schedule": "pipeline"}


def keys(layout: str) -> list[str]:
    return [f"{TABLE.get(word.partition('=')[0], 'parallel')}.{word}" for word in layout.split()]


def planned(model: str, layout: str, ranks: int, *more: str, batches: int = 4):
    """Return the plan with so many microbatches on each data rank."""
    dp = next(int(word[3:]) for word in layout.split() if word.startswith("dp="))
    batch = f"batch.global={dp * batches}", "batch.micro=1", "data.sequence=512"
    return plan_of(resolve(settings.load(None, [*batch, *MODELS[model], *keys(layout), *more]), ranks, 256))


GRID = [(model, layout, ranks) for model in MODELS for pp in LAYOUTS for layout, ranks in LAYOUTS[pp].items()]
GRID = [
    each
    for number, each in enumerate(GRID)
    if EVERY or number % 12 == 1 or (each[1] in ("dp=8", "dp=2 pp=2 schedule=v-half") and number % 2)
]
GIVEN = (
    *("batch.global=8", "batch.micro=1", "data.sequence=512", *MODELS["reference"]),
    *("parallel.dp=2", "parallel.zero=2", "comm.bucket_mb=64"),
)
FEW_AND_LARGE = [
    *(("llama3.2-1b", f"dp=2 pp=2 schedule={name}") for name in ("v-half", "zbv")),
    *(("mixtral", f"dp=2 pp=2 schedule={name}") for name in ("1f1b", "interleaved")),
]
SHARDED = {"mixtral dp=8": ("mixtral", "dp=8 ep=4", 8), "mixtral dp=4": ("mixtral", "dp=4 ep=2", 4)}
SHARDED["mixtral ep=dp"] = "mixtral", "dp=4 ep=4", 4


@pytest.mark.parametrize(("model", "layout", "ranks"), [*GRID, *SHARDED.values()], ids=str)
@pytest.mark.parametrize("batches", [1, 4, 16])
def test_memory_falls_from_zero_0_to_3(model, layout, ranks, batches):
    """For every number of microbatches, model and schedule; or it is said why not."""
    if ("pp" in layout) != (batches == 4):
        pytest.skip("schedules have 4, others 1 and 16")
    plan = planned(model, layout, ranks, "parallel.zero=1", BF16, batches=batches)
    found = by_value(plan, ZERO)
    values = list(found.values())
    assert list(found) == [0, 1, 2, 3]
    falls = values == sorted(values, reverse=True) and len(set(values)) == 4
    notes = idle_values(plan, ZERO, found)
    divided = any(word in layout for word in ("zb", "v-half"))
    if model == "mixtral" and divided:  # rows of experts come in rounds
        assert not falls and all("such as 1f1b" in line for line in notes) and notes
    elif layout == "dp=4 ep=4":  # a rank has its experts alone
        assert values[1] < values[0] and values[3] < values[2]
        assert [line[:17] for line in notes] == ["parallel.zero = 2"]
        assert "no two ranks have the same experts (parallel.ep = 4)" in notes[0]
    elif (model, layout) in FEW_AND_LARGE:  # both ends on one rank, or two blocks of three: half is saved
        assert not falls and all("up to two neighbours" in line for line in notes) and notes
    else:
        assert falls and not notes, (found, notes)


@pytest.mark.parametrize("pairs", [("whole", 1), ("parts", 3)], ids=str)
@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev"])
def test_a_pair_holds_what_the_forward_adds_or_the_backward_has_left_not_both(schedule, pairs):
    """They take turns block by block. What is made again is there for one block of each."""
    layout = f"dp=2 pp=2 schedule={schedule}"

    def kept_and_more(*keys):
        walked = f"pipeline.pairs={pairs[0]}", f"parallel.zero={pairs[1]}"
        found = predict(planned("reference", layout, 4, *walked, *keys))
        return [(usage.activations, usage.recomputed) for usage in found]

    assert all(more == 0 for _, more in kept_and_more())
    blocks = 8 / 2 / (2 if schedule == "dualpipev" else 1)
    stash = max(kept for kept, _ in kept_and_more()) / 4
    assert all(0 < more <= 2 * stash / blocks for _, more in kept_and_more("memory.recompute=full"))


@pytest.mark.parametrize("zero", [2, 3])
def test_both_copies_of_dualpipe_keep_whole_gradients_and_it_is_said(zero):
    plan = planned("reference", "dp=2 pp=2 schedule=dualpipe", 4, f"parallel.zero={zero}")
    (line,) = costs(plan)
    assert line.startswith(
        'parallel.reduce = "microbatch" does nothing with dualpipe: both copies of a stage are summed first'
    )
    assert all("both copies" in line for line in idle_values(plan, ZERO, by_value(plan, ZERO)))
    once = planned(
        "reference", "dp=2 pp=2 schedule=dualpipe", 4, f"parallel.zero={zero}", "parallel.reduce=step"
    )
    assert most_bytes(once) == most_bytes(plan)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("model", "layout", "ranks"), [*GRID, *SHARDED.values()], ids=str)
def test_weights_that_are_kept_over_a_step_hold_no_more_than_zero_2(model, layout, ranks):
    """So parallel.gather = "auto" never chooses what holds more than the stage below."""
    below = by_value(planned(model, layout, ranks, "parallel.zero=2", BF16), ZERO, [2])[2]
    given = model, layout, ranks, "parallel.zero=3", BF16
    step, use = (planned(*given, f"parallel.gather={gather}") for gather in ("step", "use"))
    assert most_bytes(step) <= below
    assert not any(usage.gathered for usage in predict(step))
    (line,) = [line for line in costs(step) if "gather" in line]
    # of few long blocks
    assert ('"step" holds no more' in line) == (most_bytes(use) >= most_bytes(step))


def test_weights_that_nobody_else_has_are_not_lent():
    usage = predict(planned("mixtral", "dp=4 ep=4", 4, "parallel.zero=3", BF16))[0]
    dense = predict(planned("mixtral", "dp=4 ep=4", 4, "parallel.zero=3", BF16, "model.layers=1"))[0]
    assert usage.gathered < 2 * dense.gathered  # the embedding, and a block without its experts


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("schedule", ["1f1b", "v-half", "zb-h1"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_sum_after_each_microbatch_that_holds_no_less_is_said(schedule, zero):
    """Of a small model most buckets of a stage are lent at once; with ZeRO-0 the sums are whole, too."""
    for model, bucket in (("reference", 4), ("reference", 64), ("smollm2-135m", 4)):
        layout = f"dp=2 pp=2 schedule={schedule}", 4
        common = model, *layout, f"parallel.zero={zero}", f"comm.bucket_mb={bucket}"
        once, each = (planned(*common, f"parallel.reduce={how}", batches=8) for how in ("step", "microbatch"))
        lines = [line for line in costs(each) if line.startswith('parallel.reduce = "microbatch" with')]
        before, after = ([u.gradients + u.unreduced for u in predict(plan)] for plan in (once, each))
        saves = any(b < a for a, b in zip(before, after))
        assert saves != bool(lines), (lines, before, after)
        assert all(" 8 times a step" in line for line in lines)


def test_a_run_and_check_say_what_its_settings_do_not_save():
    few = planned("reference", "dp=2", 2, "parallel.zero=2", "comm.bucket_mb=64")
    (line,) = idle_here(few)
    assert line in idle_values(few, ZERO, by_value(few, ZERO)) and line in show_proof(None, GIVEN, 2)
    for more in ("memory.recompute=selective", "memory.recompute=full", "memory.recompute=every-k"):
        plan = planned("reference", "dp=2 pp=2 schedule=v-half", 4, more)
        mine = f'"{plan.config.memory.recompute}" holds'
        known = [line for line in idle_values(plan, RECOMPUTE, by_value(plan, RECOMPUTE)) if mine in line]
        said = [line for line in idle_here(plan) if "memory.recompute" in line]
        assert said == known or "every-k" in more


def test_a_schedule_that_holds_more_than_1f1b_says_so():
    """Of llama3-8b: with short sequences its embedding and head are more than what is halved."""
    given = "llama3-8b", "dp=1 pp=4 schedule=v-half", 4, BF16
    short, long = (planned(*given, f"data.sequence={n}", batches=8) for n in (256, 8192))
    (line,) = idle_here(short)
    assert line.startswith('pipeline.schedule = "v-half" holds') and "both ends" in line
    once = planned("llama3-8b", "dp=1 pp=4 schedule=1f1b", 4, BF16, "data.sequence=256", batches=8)
    assert f"{(most_bytes(short) - most_bytes(once)) / 1e6:,.2f} MB more" in line
    assert not idle_here(long) and not idle_here(once)


def test_weights_dropped_after_each_use_that_take_no_less_are_said():
    """A model of one block: with the embedding and the head all of it is lent at once."""
    given = "reference", "dp=2", 2, "parallel.zero=3", "model.layers=1"
    (line,) = [line for line in costs(planned(*given)) if "gather" in line]
    assert line.startswith('parallel.gather = "use" holds') and 'although "step" sends less' in line
    assert not [
        line for line in costs(planned("reference", "dp=2", 2, "parallel.zero=3")) if "gather" in line
    ]


@pytest.mark.parametrize("more", [(), ("parallel.ep=4",)], ids=str)
def test_experts_that_ranks_divide_make_zero_1_the_default(more):
    """With one data rank and tensor parallelism; unless each rank has experts of its own."""
    given = "mixtral", "dp=1 tp=4", 4
    default, whole = planned(*given, *more), planned(*given, *more, "parallel.zero=0")
    assert default.config.parallel.zero == (0 if more else 1)
    assert (most_bytes(default) < most_bytes(whole)) == (not more)


def test_what_does_not_fall_is_said():
    """The default of comm.bucket_mb makes two buckets of the quickstart's model.

    As large a part of it is lent as is divided.
    """
    base = "model.preset=quickstart", "parallel.dp=2", "parallel.zero=1"
    plan = plan_of(resolve(settings.load(None, base), 2, 256))
    found = by_value(plan, ZERO)
    (line,) = idle_values(plan, ZERO, found)
    assert found[2] > found[1] and line.startswith("parallel.zero = 2 holds 2.52 MB more than 1 here")
    assert "a smaller comm.bucket_mb (here 4) needs less" in line
    smaller = plan_of(resolve(settings.load(None, (*base, "comm.bucket_mb=0.5")), 2, 256))
    assert not idle_values(smaller, ZERO, by_value(smaller, ZERO))


CHOICES = [  # (what holds more, what holds less, with what)
    (("parallel.reduce=step",), (), ("parallel.zero=2",)),
    (("parallel.reduce=step",), (), ("parallel.zero=3",)),
    (("parallel.gather=step",), ("parallel.gather=use",), ("parallel.zero=3",)),
    (("parallel.ahead=3",), (), ("parallel.zero=3",)),
    ((), (BF16,), ()),
    ((), ("optimizer.moments=bf16",), ()),
    ((), ("optimizer.name=sgd",), ()),
    ((), ("memory.recompute=selective",), ()),
    (("memory.recompute=selective",), ("memory.recompute=full",), ()),
    ((), ("memory.offload=activations",), ()),
    ((), ("memory.offload=optimizer",), (BF16,)),
]


@pytest.mark.few_cases(5)
@LONG
@pytest.mark.parametrize(("model", "layout", "ranks"), GRID[:: 3 if EVERY else 9], ids=str)
@pytest.mark.parametrize(("more", "less", "common"), CHOICES, ids=str)
def test_each_saving_saves(model, layout, ranks, more, less, common):
    if model == "mixtral" and "offload=activations" in str(less):
        pytest.skip("refused")
    most, least = (most_bytes(planned(model, layout, ranks, *common, *each)) for each in (more, less))
    plan = planned(model, layout, ranks, *common, *less)
    notes = [
        line
        for line in idle_values(plan, RECOMPUTE, by_value(plan, RECOMPUTE))
        if f'"{plan.config.memory.recompute}" holds' in line
    ]
    if "parallel.gather=step" in more:
        notes = [
            line for line in costs(planned(model, layout, ranks, *common, *more)) if "holds no more" in line
        ]
    assert least < most or notes
    # what waits for its weight gradients isn't recomputed; of three blocks of experts two are lent
    assert not notes or "zb" in layout or "v-half" in layout or model == "mixtral"


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "schedule",
    but_for(
        ["1f1b", "gpipe", "zb-h1", "zbv", "v-half", "v-min", "interleaved", "seq1f1b"],
        longer=["gpipe", "zb-h1", "zbv", "v-min"],
    ),
)
@pytest.mark.parametrize("zero", [2, 3])
def test_a_sum_after_each_microbatch_holds_less_under_every_schedule(schedule, zero):
    common = "llama3-8b", f"dp=4 pp=2 schedule={schedule}", 8, BF16, f"parallel.zero={zero}"
    once, each = (planned(*common, f"parallel.reduce={how}", batches=8) for how in ("step", "microbatch"))
    for before, after in zip(predict(once), predict(each)):
        assert after.lent < 0.35 * before.lent and after.on_device < before.on_device


def test_schedules_that_halve_memory_do():
    names = ("gpipe", "1f1b", "v-half", "v-min")
    held = [
        most_bytes(planned("llama3.2-1b", f"dp=2 pp=4 schedule={name}", 8, "data.sequence=2048", batches=16))
        for name in names
    ]
    assert held == sorted(held, reverse=True) and len(set(held)) == len(held)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dp"])
@pytest.mark.parametrize("zero", [1, 3])
def test_more_ranks_hold_less_each(axis, zero):
    def held(degree):
        degrees = {"dp": 2, "tp": 1, "pp": 1, "cp": 1, axis: degree}
        ranks = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
        layout = " ".join(f"{name}={n}" for name, n in degrees.items())
        return most_bytes(planned("llama3-8b", layout, ranks, BF16, f"parallel.zero={zero}", batches=8))

    few = held(2 if axis == "dp" else 1)
    more = held(4 if axis == "dp" else 2)
    most = held(8 if axis == "dp" else 4)
    assert few > more > most


GROWTH = (
    ("model.layers", 8, 12, 16),
    ("model.width", 1024, 2048, 4096),
    ("data.sequence", 256, 512, 1024),
    ("batch.micro", 1, 2, 4),
)


@pytest.mark.few_cases(2)
@LONG
@pytest.mark.parametrize(
    ("key", "values"), [(key, values) for key, *values in GROWTH], ids=lambda part: str(part)
)
@pytest.mark.parametrize(
    "more",
    [(), ("memory.recompute=full",), ("memory.recompute=every-k",), ("parallel.reduce=microbatch",)],
    ids=str,
)
def test_a_prediction_never_falls_when_a_model_or_batch_grows(key, values, more):
    base = (
        "model.layers=8",
        "model.width=1024",
        "model.heads=16",
        "model.kv_heads=8",
        "model.ffn=2048",
        "batch.global=64",
        "parallel.dp=2",
    )
    for zero in (0, 1, 2) if "every-k" in str(more) else (0, 1, 2, 3):
        given = [(*base, *more, f"{key}={value}", f"parallel.zero={zero}") for value in values]
        held = [most_bytes(plan_of(resolve(settings.load(None, each), 2, 1000))) for each in given]
        assert held == sorted(held), (zero, held)


def test_microbatches_in_flight_never_lessen_a_prediction():
    for name, zero in itertools.product(("1f1b", "gpipe", "v-half"), (1, 2, 3)):
        held = [
            most_bytes(planned("reference", f"dp=2 pp=2 schedule={name} zero={zero}", 4, batches=n))
            for n in (4, 8, 16)
        ]
        assert held == sorted(held), (name, zero, held)


def test_what_is_held_for_speed_is_said():
    for more, begins in (
        (("parallel.zero=3", "parallel.reduce=step"), 'parallel.reduce = "step" keeps'),
        (("parallel.zero=3", "parallel.gather=step"), 'parallel.gather = "step" holds'),
        (("parallel.zero=2", "numerics.reproducible=layout"), 'parallel.reduce = "step" keeps'),
        (
            ("parallel.zero=0", "parallel.reduce=microbatch"),
            'parallel.reduce = "microbatch" with parallel.zero = 0 holds',
        ),
    ):
        (line,) = costs(planned("reference", "dp=4", 4, *more))
        assert line.startswith(begins)
    for zero in range(4):
        assert not costs(planned("reference", "dp=4", 4, f"parallel.zero={zero}"))


def test_zero_over_one_data_rank_is_no_more_than_none():
    alone = [planned("reference", "dp=1 pp=2", 2, f"parallel.zero={zero}") for zero in range(4)]
    assert {plan.config.parallel.zero for plan in alone} == {0}
    assert len({most_bytes(plan) for plan in alone}) == 1
