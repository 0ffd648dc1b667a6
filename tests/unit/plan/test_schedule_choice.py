"""`pipeline.schedule = "auto"` and `pipeline.trace`: what a configuration is resolved to."""

import json

import pytest

from mpitrain import config as settings
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.model.families.catalog import plan_of
from mpitrain.origins import DERIVED
from mpitrain.plan.settings.key_origins import with_resolved
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules import catalog
from mpitrain.schedules.options import Times
from mpitrain.schedules.play.simulate import simulate_table

SMALL = (
    "model.layers=8", "model.width=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64",
    "data.sequence=32", "batch.global=8", "parallel.pp=2",
)  # fmt: skip


def resolved(*overrides):
    return resolve(settings.load(None, [*SMALL, *overrides]), 2, 256)


@pytest.fixture
def run(tmp_path):
    """A run directory with a trace whose last stage takes four times as long."""
    plan = plan_of(resolved("pipeline.schedule=zb-h1"))
    stages = ((1, 1, 1), (4, 4, 4))
    timeline = simulate_table(plan.table, Times(message=0.25), stages)
    events = [
        {
            "ph": "X", "name": str(action), "pid": 0, "tid": rank, "ts": 1000 * start,
            "dur": 1000 * (end - start), "args": {"step": 2},
        }
        for rank, program in enumerate(timeline.programs)
        for action, start, end in zip(program, timeline.starts[rank], timeline.ends[rank])
    ]  # fmt: skip
    works = [stage.work for stage in plan.stages]
    other = {"schedule": "zb-h1", "copies": 1, "segments": 1, "works": works}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events, "otherData": other}))
    return tmp_path


def test_auto_becomes_the_name_of_a_schedule():
    config = resolved("pipeline.schedule=auto")
    assert config.pipeline.schedule in catalog.NAMES and config.pipeline.trace == ""
    table = plan_of(config).table
    assert len(table.ranks) == 2 and table.num_microbatches == 8
    assert resolve(config, 2, 256) == config  # what a run records is read as it is


@pytest.mark.parametrize("limit", [1, 1.5, 2, 4])
def test_a_chosen_schedule_keeps_the_limit(limit):
    table = plan_of(resolved("pipeline.schedule=auto", f"pipeline.memory_limit={limit}")).table
    held = max(map(simulate_table(table).peak_in_flight, range(2)))
    assert held <= limit * table.num_stages / 2


@pytest.mark.parametrize("given", ["trace", "trace.json"])
def test_a_trace_says_what_a_search_plans_with(run, given):
    path = run if given == "trace" else run / given
    config = resolved("pipeline.schedule=plain-auto", f"pipeline.trace={path}")
    assert config.pipeline.stage_times == [pytest.approx([1, 1, 1]), pytest.approx([4, 4, 4])]
    assert config.pipeline.times == pytest.approx([2.5, 2.5, 2.5, 0.25])
    assert config.pipeline.trace == ""
    v = resolved("pipeline.schedule=v-auto", f"pipeline.trace={path}").pipeline
    assert len(v.stage_times) == 4 and v.stage_times[0] == pytest.approx([0.5] * 3, rel=0.5)
    assert plan_of(resolved("pipeline.schedule=auto", f"pipeline.trace={path}")).table.num_microbatches == 8


def test_the_origin_of_a_chosen_schedule_is_derived():
    given = settings.read(None, [*SMALL, "pipeline.schedule=auto"])
    config = resolve(given.config, 2, 256)
    assert with_resolved(given, config).origins.of("pipeline.schedule").kind == DERIVED


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.trace=absent"], r'pipeline.trace has no effect on 1f1b, .* "auto"'),
        (["pipeline.schedule=auto", "pipeline.trace=absent"], r'pipeline.trace = "absent" can\'t be read'),
        (
            ["pipeline.schedule=auto", "pipeline.trace=absent", "pipeline.times=[1,1,1,0]"],
            "pipeline.trace and pipeline.times both say",
        ),
        (["pipeline.schedule=auto", "pipeline.chunks=5"], "= 10 stages for model.layers = 8 blocks"),
        (["pipeline.schedule=auto", "pipeline.stages=[3,3,2]"], "pipeline.stages: found 3 stages"),
        (["pipeline.schedule=auto", "pipeline.group=2"], "auto: group has no effect"),
        (["pipeline.schedule=auto", "pipeline.memory_limit=0.5"], "0.5 stashes, needed at least 1"),
        (["pipeline.schedule=v-auto", "pipeline.stage_times=[[1,1,1]]"], "found times of 1 stage, needed 4"),
        (["pipeline.schedule=auto", "pipeline.stage_times=[[1,1]]"], r"pipeline.stage_times\[0\]"),
        (["pipeline.schedule=auto", "pipeline.stage_times=[[1,1,inf]]"], "expected a finite number, got inf"),
        (["pipeline.schedule=zbv", "pipeline.stage_times=[[1,1,1]]"], "zbv: stage_times has no effect"),
    ],
)
def test_what_cannot_be_planned_is_refused(overrides, message):
    with pytest.raises((ConfigError, ScheduleError), match=message):
        plan_of(resolved(*overrides)).table  # noqa: B018


def test_stages_that_are_configured_are_kept():
    config = resolved("pipeline.schedule=auto", "pipeline.stages=[2,2,2,2]")
    assert config.pipeline.chunks == 2
    assert [len(stage.inner) for stage in plan_of(config).stages] == [2, 2, 2, 2]
