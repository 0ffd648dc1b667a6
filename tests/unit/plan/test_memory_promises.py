"""What a schedule, an axis, regather or a stage of ZeRO promises to hold it does, or says that it doesn't."""

import hypothesis
import pytest
from conftest import WITH_LONG
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain.commands.inspect import show_memory
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.predict.promises import (
    REGATHER,
    by_value,
    idle_axes,
    idle_here,
    idle_schedule,
    most_bytes,
    promises,
)
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules.catalog import NAMES

MODEL = ("model.layers=8", "model.width=256", "model.heads=4", "model.kv_heads=2", "model.ffn=704")
FEW = hypothesis.settings(max_examples=25 if WITH_LONG else 5, derandomize=True, deadline=None)


def planned(ranks: int, *given: str):
    return plan_of(resolve(settings.load(None, (*MODEL, *given)), ranks, 256))


@st.composite
def pipelines(draw) -> tuple[str, ...]:
    """Draw keys of a layout of two or four pipeline ranks, without its schedule."""
    pp = draw(st.sampled_from((2, 4)))
    keys = {
        "parallel.pp": pp,
        "model.vocab": draw(st.sampled_from((256, 20_000))),
        "data.sequence": draw(st.sampled_from((64, 1024))),
        "batch.global": draw(st.sampled_from((1, 2, 8, 16))),
        "precision.compute": draw(st.sampled_from(("fp32", "bf16"))),
        "memory.recompute": draw(st.sampled_from(("none", "selective", "full"))),
        "memory.offload": draw(st.sampled_from(("none", "activations"))),
    }
    return tuple(f"{key}={value}" for key, value in keys.items())


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("schedule", [name for name in NAMES if promises(name)])
@FEW
@hypothesis.given(pipelines())
def test_a_schedule_holds_what_it_promises_or_says_that_it_does_not(schedule, keys):
    pp = int(keys[0].partition("=")[2])
    plan = planned(pp, *keys, f"pipeline.schedule={schedule}")
    mine, broken = most_bytes(plan), None
    for other, less in reversed(promises(schedule)):
        more = mine - most_bytes(planned(pp, *keys, f"pipeline.schedule={other}"))
        if more > 0 or (less and not more):
            word = f"{more / 1e6:,.2f} MB more than" if more else "as much as"
            broken = f'pipeline.schedule = "{schedule}" holds {word} "{other}" here: '
    said = idle_schedule(plan)
    assert [line.startswith(broken or "") for line in said] == [True] * bool(broken)


@pytest.mark.parametrize(
    ("schedule", "batch", "why"),
    [
        ("zb-h1", 8, "keeps both factors of each weight gradient"),
        ("1f1b", 1, "so few microbatches that all are in flight either way"),
    ],
)
def test_why_a_schedule_holds_no_less_is_said(schedule, batch, why):
    given = "parallel.pp=2", f"pipeline.schedule={schedule}", f"batch.global={batch}", "memory.recompute=full"
    assert why in show_memory(None, (*MODEL, *given, "run.layout=default"), 2)
    # a default that is as it has to be isn't worth a line of a run
    assert any(why in line for line in idle_here(planned(2, *given))) == (schedule != "1f1b")


@pytest.mark.parametrize("offload", ["none", "activations"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("vocab", [256, 50_000])
def test_regather_that_holds_no_less_says_so(offload, recompute, vocab):
    given = (
        *("parallel.tp=2", "parallel.regather=true", "data.sequence=64", f"model.vocab={vocab}"),
        *(f"memory.offload={offload}", f"memory.recompute={recompute}"),
    )
    plan = planned(2, *given)
    found = by_value(plan, REGATHER)
    said = [line for line in idle_here(plan) if line.startswith("parallel.regather = true holds")]
    assert len(said) == (found[True] >= found[False])
    assert said == [line for line in show_memory(None, (*MODEL, *given), 2).splitlines() if line in said]
    if offload == "activations":
        assert "host memory" in said[0]


def test_a_stage_of_zero_that_divides_host_memory_alone_says_so():
    given = "parallel.dp=2", "memory.offload=optimizer", "parallel.zero=1", "precision.compute=bf16"
    said = [line for line in idle_here(planned(2, *given)) if line.startswith("parallel.zero = 1 holds")]
    assert said and "the state it divides is in host memory" in said[0]
    assert said[0] in show_memory(None, (*MODEL, *given, "run.layout=default"), 2).splitlines()


@pytest.mark.parametrize("buffer", [2, 0.5])
@pytest.mark.parametrize(("key", "zero"), [("ep", 0), ("ep", 1), ("etp", 1)])
def test_experts_that_ranks_divide_and_that_hold_no_less_say_so(key, zero, buffer):
    experts = (
        "model.family=mixtral",
        "experts.count=4",
        "model.width=64",
        "data.sequence=1024",
        "model.ffn=128",
    )
    given = *experts, "parallel.dp=4", f"parallel.zero={zero}", "batch.global=4", f"experts.buffer={buffer}"
    divided = *given, f"parallel.{key}=4"
    more = most_bytes(planned(4, *divided)) - most_bytes(planned(4, *given))
    said = [line for line in idle_axes(planned(4, *divided)) if line.startswith("parallel.ep")]
    assert [f"holds {more / 1e6:,.2f} MB more than 1 and 1 here" in line for line in said] == [True] * (
        more > 0
    )
    assert said if buffer == 2 else key == "etp" or not said
    assert set(said) <= set(show_memory(None, (*MODEL, *divided), 4).splitlines())


TINY = "model.layers=4", "model.width=64", "model.heads=4", "model.kv_heads=4", "model.ffn=128"
WIDE = "model.layers=8", "model.width=512", "model.heads=8", "model.kv_heads=4", "model.ffn=1408"


def test_experts_over_ranks_of_tp_are_not_compared_with_a_rank_without_it():
    """Which would have no ranks to divide the experts over."""
    small = *TINY, "model.layers=1", "data.sequence=32", "batch.global=4"
    given = "model.family=mixtral", "experts.count=4", *small
    for keys, said in ((("parallel.ep=4",), False), ((), True)):
        lines = idle_axes(planned(4, *given, "parallel.tp=4", *keys))
        assert any(line.startswith("parallel.tp = 4 holds") for line in lines) == said, lines


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("model", [TINY, WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize(
    ("axis", "more", "why"),
    [
        ("tp", (), "communication buffers take"),
        ("cp", (), "communication buffers take"),
        ("pp", (), "communication buffers take"),
        ("pp", ("pipeline.schedule=gpipe", "data.sequence=2048"), "up to 8 microbatches are in flight"),
        ("pp", ("pipeline.schedule=dualpipe",), "two stages on each rank"),
    ],
)
def test_an_axis_that_divides_less_than_it_costs_says_so(axis, more, why, model, dp):
    given = *model, f"parallel.dp={dp}", "parallel.zero=0", f"batch.global={8 * dp}", "data.sequence=64"
    once = most_bytes(planned(dp, *given, *(key for key in more if "schedule" not in key)))
    plan = planned(2 * dp, *given, *more, f"parallel.{axis}=2")
    held = (most_bytes(plan) - once) / 1e6
    said = idle_axes(plan)
    assert [f"parallel.{axis} = 2 holds {held:,.2f} MB more than 1 here" in line for line in said] == [
        True
    ] * (held > 0)
    assert all(why in line for line in said)
    assert said or model == WIDE or (axis, dp) == ("cp", 2)
    shown = show_memory(None, (*given, *more, f"parallel.{axis}=2", "run.layout=default"), 2 * dp)
    assert set(said) <= set(shown.splitlines())
