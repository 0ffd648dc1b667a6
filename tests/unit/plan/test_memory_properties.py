"""What is predicted never falls as a model, a sequence or a batch grows, nor changes with what does nothing.

Hypothesis makes the layouts.
"""

import hypothesis
import pytest
from conftest import EVERY, WITH_LONG
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.promises import most_bytes
from mpitrain.plan.settings.resolve import resolve

IDLE = (  # what holds nothing, in any layout
    *("run.steps=7", "run.keep=3", "run.log_every=1", "run.trace=2", "run.verify=0.5", "run.max_skips=3"),
    *("optimizer.lr=0.1", "optimizer.decay=0", "optimizer.clip=0", "schedule.warmup=3"),
    "schedule.name=constant",
    *("comm.timeout_s=9", "comm.slow_after=0", "comm.progress=thread", "comm.device=staged"),
    *("numerics.check_every=1", "spikes.do=count", "data.val_fraction=0.2"),
)
SCHEDULES = "1f1b", "gpipe", "zb-h1", "zbv", "v-half", "interleaved", "seq1f1b", "dualpipe"
MODEL = {"layers": 8, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 512}
FEW = hypothesis.settings(
    max_examples=400 if EVERY else 30 if WITH_LONG else 5, derandomize=True, deadline=None
)


@st.composite
def layouts(draw) -> dict[str, object]:
    """Draw the keys of a layout of at most 8 ranks; all of them, so that one can be replaced."""
    dp, pp, tp, cp = (draw(st.sampled_from(degrees)) for degrees in ((1, 2, 4), (1, 2), (1, 2), (1, 2)))
    zero = draw(st.integers(0, 3))
    keys = {f"model.{key}": value for key, value in MODEL.items()}
    keys |= {"parallel.dp": dp, "parallel.pp": pp, "parallel.tp": tp, "parallel.cp": cp}
    keys["parallel.zero"] = zero
    keys |= {"data.sequence": 128, "batch.micro": 1, "batch.global": dp * 8}
    keys["precision.compute"] = draw(st.sampled_from(("fp32", "bf16")))
    keys["memory.recompute"] = draw(st.sampled_from(("none", "full", "selective")))
    keys["parallel.reduce"] = draw(st.sampled_from(("auto", "step", "microbatch")))
    keys["comm.bucket_mb"] = draw(st.sampled_from((0.1, 4.0)))
    if pp > 1:
        keys["pipeline.schedule"] = draw(st.sampled_from(SCHEDULES))
    if draw(st.booleans()):
        keys |= {"model.family": "mixtral", "experts.count": 4, "parallel.ep": draw(st.sampled_from((1, dp)))}
    return keys


def planned(keys: dict[str, object], *more: str):
    """Return the plan of a layout, or let hypothesis draw another one where it is refused."""
    ranks = keys["parallel.dp"] * keys["parallel.pp"] * keys["parallel.tp"] * keys["parallel.cp"]
    given = [*(f"{key}={value}" for key, value in keys.items()), *more]
    try:
        plan = plan_of(resolve(settings.load(None, given), ranks, 256))
        assert plan.training
    except ConfigError:
        hypothesis.reject()
    return plan


@FEW
@hypothesis.given(layouts(), st.sampled_from(IDLE))
def test_what_does_nothing_changes_no_prediction(keys, idle):
    assert predict(planned(keys, idle)) == predict(planned(keys))


GROWTH = {
    "model.layers": 2,
    "model.width": 2,
    "model.ffn": 2,
    "model.vocab": 3,
    "data.sequence": 2,
    "batch.micro": 2,
    "batch.global": 2,
}


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("key", GROWTH)
@FEW
@hypothesis.given(layouts())
def test_a_prediction_never_falls_with_what_grows(key, keys):
    """With twice the layers, width, hidden units, sequence, sequences of a microbatch, and microbatches."""
    larger = keys | {key: keys[key] * GROWTH[key]}
    if key == "batch.micro":
        larger["batch.global"] = keys["batch.global"] * 2
    before = most_bytes(planned(keys))
    after = most_bytes(planned(larger))
    assert after >= before, (before, after)


@FEW
@hypothesis.given(layouts())
def test_zero_on_one_data_rank_holds_what_none_does(keys):
    alone = keys | {"parallel.dp": 1, "parallel.cp": 1, "parallel.tp": 1, "batch.global": 8}
    alone["parallel.reduce"] = "auto"
    alone = {key: value for key, value in alone.items() if key != "parallel.ep"}
    assert predict(planned(alone)) == predict(planned(alone | {"parallel.zero": 0}))


LENT = {"parallel.dp": 2, "parallel.zero": 2, "batch.global": 8, "model.width": 256, "model.vocab": 20_000}


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("width", [64, 256])
def test_a_head_and_an_embedding_above_small_blocks_are_not_lent_together(tied, width):
    """Under the blocks the head is reduced, so that more layers never hold less than a few."""
    shape = {"model.heads": 4, "model.kv_heads": 2, "model.ffn": 256, "data.sequence": 32, "model.tied": tied}
    held = []
    for layers in (1, 2, 3, 4, 6, 8, 12):
        keys = LENT | shape | {"model.width": width, "model.layers": layers}
        plan = plan_of(
            resolve(settings.load(None, [f"{key}={value}" for key, value in keys.items()]), 2, 256)
        )
        assert predict(plan)[0].unreduced < 1.6 * LENT["model.vocab"] * width * 4
        held.append(most_bytes(plan))
    assert held == sorted(held), held


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("layers", "sequence"), [(4, 512), (8, 128), (12, 1024)])
def test_the_number_of_blocks_recomputed_together_is_the_one_that_holds_least(zero, layers, sequence):
    keys = {f"model.{key}": value for key, value in MODEL.items()} | LENT
    keys |= {"model.layers": layers, "data.sequence": sequence, "parallel.zero": zero}
    keys |= {
        "memory.recompute": "every-k",
        "batch.micro": 1,
        "parallel.pp": 1,
        "parallel.tp": 1,
        "parallel.cp": 1,
    }
    others = [most_bytes(planned(keys, f"memory.every={number}")) for number in range(1, layers + 1)]
    assert min(others) <= most_bytes(planned(keys)) <= 1.03 * min(others)
