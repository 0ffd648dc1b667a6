"""How unevenly experts are loaded in predictions: stated, counted in a trace, estimated."""

from itertools import product

import numpy as np
import pytest
from public_models import public_model

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.expert_load import (
    CountedLoad,
    StatedLoad,
    counts_of,
    expert_load,
    load_of_fullest,
)
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step import predict_step
from mpitrain.plan.predict.step_time.step_model import step_model
from mpitrain.plan.routing import RoutingTrace
from mpitrain.plan.settings.resolve import resolve
from mpitrain.planner.of_config import expert_load_of

LAPTOP, H100 = (machine_of(find_machine(name)) for name in ("laptop", "h100-80gb"))
STEPS, BATCH, SEQUENCE, COUNT, ACTIVE = 3, 8, 6, 4, 2
MODEL = (
    "model.family=mixtral", f"experts.count={COUNT}", f"experts.active={ACTIVE}", "model.layers=2",
    f"batch.global={BATCH}", f"data.sequence={SEQUENCE}",
)  # fmt: skip


def trace_of(seed: int = 0) -> RoutingTrace:
    """Return a routing in which low experts are chosen more often, by blocks and sequences differently."""
    random = np.random.default_rng(seed)
    shape = (STEPS, BATCH, SEQUENCE, COUNT)
    taste = random.gumbel(size=shape) - np.linspace(0, 2, COUNT)
    blocks = {
        f"blocks.{block}.ffn.router.load": np.sort(
            np.argsort(taste + random.normal(size=(1, BATCH, 1, COUNT)), -1)[..., -ACTIVE:], -1
        )
        for block in range(2)
    }
    return RoutingTrace(blocks)


def fullest_over_mean(trace: RoutingTrace, dp: int, together: int, micro: int, ep: int) -> float:
    """Count as ranks do it: whose rows meet, and which of them comes to whom."""
    rows_of_rank = BATCH // dp
    loads = []
    for experts, step in product(trace.experts.values(), range(STEPS)):
        for group, m in product(range(dp // together), range(rows_of_rank // micro)):
            rows = [0] * ep
            for rank in range(group * together, (group + 1) * together):
                for row in range(micro):
                    for expert in experts[step, rank * rows_of_rank + m * micro + row].ravel():
                        rows[expert // (COUNT // ep)] += 1
            loads.append(max(rows) / (sum(rows) / ep))
    return sum(loads) / len(loads)


@pytest.mark.parametrize(
    ("degrees", "together"),
    [
        (dict(ranks=2, ep=2), 2),
        (dict(ranks=4, ep=2), 2),
        (dict(ranks=4, ep=4, micro=2), 4),
        (dict(ranks=4, ep=2, etp=2), 4),
        (dict(ranks=4, tp=2, ep=2), 1),
        (dict(ranks=4, tp=2, ep=4), 2),
        (dict(ranks=8, tp=2, cp=2, ep=4, micro=4), 1),
        (dict(ranks=8, pp=2, ep=4), 4),
        (dict(ranks=6, tp=3, ep=2, micro=2), 1),  # ep goes through a data rank: as if it had all of one
    ],
)
def test_a_counted_load_is_that_of_the_rows_that_meet(degrees, together):
    layout = StepLayout(sequence=SEQUENCE, batch=BATCH, **degrees)
    trace = trace_of()
    counts = [counts_of(of_step, COUNT) for of_steps in trace.experts.values() for of_step in of_steps]
    found = CountedLoad(np.stack(counts)).on(layout)
    assert found == pytest.approx(fullest_over_mean(trace, layout.dp, together, layout.micro, layout.ep))
    assert 1 < found <= layout.ep


def test_counts_add_up_by_sequence():
    experts = np.array([[[0, 3], [0, 1]], [[2, 3], [2, 3]]])
    assert counts_of(experts, 4).tolist() == [[2, 1, 0, 1], [0, 0, 2, 2]]


def test_a_stated_load_is_capped_by_the_ranks_that_share_it():
    layout = StepLayout(8, SEQUENCE, BATCH, expert_load=StatedLoad(3.0))
    assert [load_of_fullest(layout._replace(ep=ep), LAPTOP) for ep in (1, 2, 4)] == [1, 2, 3]


def test_without_a_statement_a_machine_says():
    layout = StepLayout(8, SEQUENCE, BATCH, ep=4)
    assert [load_of_fullest(layout._replace(ep=ep), LAPTOP) for ep in (1, 2, 4)] == pytest.approx(
        [1, 1.2, 1.4]
    )
    assert load_of_fullest(layout, H100) == 1


@pytest.mark.parametrize(
    ("capacity", "loads"), [(0.0, [1, 2, 3]), (1.5, [1, 1.5, 1.5]), (0.5, [0.5, 0.5, 0.5])]
)
def test_no_rank_has_more_than_its_experts_take(capacity, loads):
    layout = StepLayout(8, SEQUENCE, BATCH, expert_load=StatedLoad(3.0), capacity=capacity)
    assert [load_of_fullest(layout._replace(ep=ep), LAPTOP) for ep in (1, 2, 4)] == loads


@pytest.mark.parametrize("machine", [LAPTOP, H100])
def test_a_step_takes_longer_the_fuller_the_fullest_rank(machine):
    shape = public_model("mixtral-8x7b")
    layout = StepLayout(8, 4096, 64, ep=8, dispatch="alltoall")
    took = [
        predict_step(shape, layout._replace(expert_load=StatedLoad(load)), machine).seconds
        for load in (1.0, 1.5, 3.0, 8.0)
    ]
    assert took == sorted(took) and took[-1] > 2 * took[0]
    alone = layout._replace(ep=1)
    seconds = {
        predict_step(shape, alone._replace(expert_load=load), machine).seconds
        for load in (None, StatedLoad(8.0))
    }
    assert len(seconds) == 1


def test_a_configuration_states_or_replays(tmp_path):
    path = tmp_path / "routing.npz"
    trace = trace_of()
    trace.write(path)
    degrees = ("parallel.ep=2", "batch.micro=1")
    replaying = plan_of(resolve(settings.load(None, (*MODEL, *degrees, f"experts.replay={path}")), 2, 99))
    replayed = layout_of(replaying.config, LAPTOP, replaying.routing)
    by_hand = fullest_over_mean(trace, 2, 2, 1, 2)
    assert load_of_fullest(replayed, LAPTOP) == pytest.approx(by_hand)
    assert replayed.expert_load.source == "experts.replay"
    stated = plan_of(resolve(settings.load(None, (*MODEL, *degrees, f"run.expert_load={by_hand}")), 2, 99))
    shape = step_model(stated)
    layouts = (replayed, layout_of(stated.config, LAPTOP, stated.routing))
    found = [predict_step(shape, layout, LAPTOP).seconds for layout in layouts]
    assert found[0] == pytest.approx(found[1])
    assert expert_load(stated.config, None).source == "run.expert_load"
    assert expert_load_of(settings.load(None, MODEL), BATCH) is None


def test_a_planner_needs_the_sequences_that_were_replayed(tmp_path):
    path = tmp_path / "routing.npz"
    trace_of().write(path)
    config = settings.load(None, (*MODEL, f"experts.replay={path}"))
    assert expert_load_of(config, BATCH).on(StepLayout(2, SEQUENCE, BATCH, ep=2)) > 1
    with pytest.raises(ConfigError, match=r"shape \[3, 8, 6, 2\]; needed \[steps, batch.global"):
        expert_load_of(config, 2 * BATCH)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*MODEL, "run.expert_load=0.5"),
            "run.expert_load = 0.5: tokens of the most loaded rank over the mean are 1",
        ),
        ((*MODEL, "run.expert_load=4.5"), "to experts.count = 4; leave it out"),
        (
            (*MODEL, "run.expert_load=1.5", "experts.replay=a.npz"),
            "with experts.replay, which says how tokens",
        ),
        (
            ("run.expert_load=1.5",),
            'run.expert_load = 1.5: model.family = "llama" has no experts; leave it out',
        ),
    ],
)
def test_a_load_that_cannot_be_is_refused(words, message):
    with pytest.raises(ConfigError) as error:
        resolve(settings.load(None, words), 2, 99)
    assert message in error.value.args[0]


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "yes"])
def test_a_load_is_a_number(value):
    with pytest.raises(ConfigError, match=r"run\.expert_load"):
        settings.load(None, (*MODEL, f"run.expert_load={value}"))
