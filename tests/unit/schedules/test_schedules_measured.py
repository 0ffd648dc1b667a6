"""Measured timelines: read from a trace, predicted from their own times, and refused if damaged."""

import json
import random

import pytest
from click.testing import CliRunner
from support.quick_schedules import NAMES

from mpitrain.cli import cli
from mpitrain.errors import BAD_INPUT, InputError, ScheduleError
from mpitrain.schedules.actions import SENDS
from mpitrain.schedules.catalog import build
from mpitrain.schedules.lowering.lower import Reduction, lower
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.play.measured import costs, predict, read_trace
from mpitrain.schedules.play.measurement import Measurement
from mpitrain.schedules.play.scale import to_scale
from mpitrain.schedules.play.simulate import Link, Timeline, simulate

MS = {"F": 2.0, "B": 5.0, "I": 2.6, "W": 2.2, "NORM": 1.0, "UPDATE": 3.0}


def played(
    name: str,
    jitter: float = 0,
    seed: int = 0,
    latency: float = 0.25,
    zero: bool = False,
    pairs: str = "whole",
) -> Timeline:
    """Play a step of 4 ranks and 8 microbatches, each instruction up to `jitter` longer.

    zero: with neither weights nor gradients whole.
    """
    table = build(name, 4, 8)
    rng = random.Random(seed)
    residency = Residency((((0,), (1,)),) * table.num_stages) if zero else None
    programs = lower(
        table, [Reduction(2, (0, 1))] * table.num_stages, residency=residency, reduce_each=zero, pairs=pairs
    )
    return simulate(
        programs,
        lambda a: MS.get(a.kind, 0) / (1 if a.part is None else 2) * (1 + rng.uniform(0, jitter)),
        Link(latency),
    )


def trace(steps: dict[int, list[Timeline]], **other) -> dict:
    """Write timelines as a run writes them: step -> one for each replica."""
    events = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "pipeline rank 0"}}]
    for step, replicas in steps.items():
        for pid, timeline in enumerate(replicas):
            for tid, program in enumerate(timeline.programs):
                for action, begin, end in zip(program, timeline.starts[tid], timeline.ends[tid]):
                    times = {"ts": 1e3 * (begin + 1000 * step), "dur": 1e3 * (end - begin)}
                    events.append(
                        {
                            "ph": "X",
                            "name": str(action),
                            "pid": pid,
                            "tid": tid,
                            **times,
                            "args": {"step": step},
                        }
                    )
    return {
        "traceEvents": events,
        "otherData": {"schedule": "1f1b", "copies": 1, "segments": 1, "dp": 1, **other},
    }


def read(content: dict):
    return read_trace(json.dumps(content))


@pytest.fixture
def steady() -> dict:
    return trace({step: [played("1f1b", 0.1, step)] for step in range(1, 7)})


# ---------------------------------------------------------------- reading


def test_the_first_step_is_left_out_and_time_begins_with_the_step(steady):
    found = read(steady)
    assert found.steps == (2, 3, 4, 5, 6)
    assert all(min(starts[0] for starts in timeline.starts) == 0 for timeline in found.timelines)
    assert read(trace({7: [played("1f1b")]})).steps == (7,)


def test_programs_end_before_the_update():
    (timeline,) = read(trace({1: [played("1f1b")]})).timelines
    whole = played("1f1b")
    assert timeline.programs == [list(program[:-2]) for program in whole.programs]
    assert timeline.makespan == pytest.approx(max(ends[-3] for ends in whole.ends))


def test_every_replica_is_a_timeline_of_its_own():
    found = read(trace({1: [played("1f1b")], 2: [played("1f1b"), played("1f1b", 0.5)]}))
    assert len(found.timelines) == 2
    assert found.timelines[0].makespan < found.timelines[1].makespan


# ---------------------------------------------------------------- prediction


@pytest.mark.parametrize(
    ("name", "zero", "pairs"),
    [
        *((name, zero, "whole") for name in NAMES for zero in (False, True)),
        ("dualpipe", True, "parts"),
        ("dualpipev", True, "parts"),
    ],
)
def test_without_jitter_the_prediction_is_the_measurement(name, zero, pairs):
    found = read(trace({1: [played(name, zero=zero, pairs=pairs)]}))
    (measured,) = found.timelines
    known = costs(measured)
    assert known.latency == pytest.approx(0.25)
    simulated = predict(measured, known)
    assert simulated.programs == measured.programs
    for ours, theirs in zip(simulated.starts + simulated.ends, measured.starts + measured.ends):
        assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zbv", "dualpipe"])
def test_with_jitter_the_prediction_is_close(name):
    found = read(trace({step: [played(name, 0.2, step)] for step in range(1, 7)}))
    for timeline in found.timelines:
        assert predict(timeline, costs(timeline)).makespan == pytest.approx(timeline.makespan, rel=0.01)


def test_of_an_instruction_that_stands_several_times_the_mean_counts():
    rng = random.Random(0)
    residency = Residency((((0,), (1,), (2,)),))
    programs = lower(build("1f1b", 1, 5), [Reduction(3, (0, 1, 2))], residency=residency)
    timeline = simulate(
        programs, lambda action: rng.uniform(1, 2) if action.kind == "GATHER" else MS.get(action.kind, 0)
    )
    assert len({costs(timeline).times[action] for action in programs[0] if action.kind == "GATHER"}) == 3
    assert predict(timeline, costs(timeline)).makespan == pytest.approx(timeline.makespan)


def test_parts_that_follow_one_another_are_drawn_as_one():
    timeline = played("1f1b", zero=True)
    assert len(timeline.walks(0)) == 16 < len(timeline.computations(0)) == 32
    assert [action.part for action, *_ in timeline.walks(0)] == [None] * 16
    row = to_scale(timeline, 400, timeline.makespan)[0]
    assert row.split(".")[0].startswith("F0-") and row.count("F0") == row.count("B0") == 1


def test_a_late_start_a_sends_own_time_and_gaps_are_kept():
    """Rank 2 begins 3 ms late, every send takes 0.5 ms, and 0.125 ms lie between two instructions."""
    programs = played("1f1b").programs

    def slow(action):
        return 0.125 + (0.5 if action.kind in SENDS else MS.get(action.kind, 0))

    timeline = _with_own_time(programs, slow, late={2: 3.0})
    found = read(trace({1: [timeline]}))
    assert predict(found.timelines[0], costs(found.timelines[0])).makespan == pytest.approx(
        found.timelines[0].makespan, rel=0.01
    )


def _with_own_time(programs, slow, late) -> Timeline:
    """Play ranks in turn until all have ended; each instruction begins 0.125 ms after the one before."""
    now = [late.get(rank, 0.0) for rank in range(len(programs))]
    sent = {}
    rows = [([], []) for _ in programs]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while len(rows[rank][0]) < len(program):
                action = program[len(rows[rank][0])]
                begin = now[rank] + 0.125
                end = now[rank] + slow(action)
                if action.kind.startswith("RECV"):
                    source = (
                        "SEND" + action.kind[4:],
                        action.index,
                        action.stage + (-1 if action.kind == "RECV_F" else 1),
                    )
                    if source not in sent:
                        break
                    end = max(begin, sent[source] + 0.25)
                now[rank] = end
                sent[action[:3]] = end
                rows[rank][0].append(begin)
                rows[rank][1].append(end)
                moved = True
    return Timeline(programs, [starts for starts, _ in rows], [ends for _, ends in rows])


# ---------------------------------------------------------------- the command


def run(path, *words) -> str:
    done = CliRunner().invoke(
        cli, ["schedule", "compare", "--trace", str(path), *map(str, words)], standalone_mode=False
    )
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.fixture
def path(tmp_path, steady):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(steady))
    return path


def test_measured_stands_under_simulated_with_the_difference(path):
    lines = run(path).splitlines()
    assert lines[0] == "1f1b: 4 ranks, 5 steps, 2 to 6; milliseconds, up to the update"
    assert lines[2].startswith("rank 0   simulated F0") and lines[3].startswith("         measured  F0")
    (makespan,) = [line for line in lines if line.startswith("makespan")]
    assert "(median of 5, " in makespan and makespan.endswith("%")
    assert sum(line.endswith("%") for line in lines) == 1 + 4


def test_json_has_the_difference_per_rank(path):
    found = json.loads(run(path, "--json"))
    assert found["difference"] == pytest.approx(found["simulated_makespan"] / found["makespan"] - 1)
    assert abs(found["difference"]) < 0.03
    assert [set(rank) for rank in found["ranks"]] == [
        {"computing", "simulated_computing", "waiting", "simulated_waiting", "end", "simulated_end"}
    ] * 4
    assert found["times"]["F@0"] == pytest.approx(2.1, rel=0.05)


@pytest.mark.parametrize("kind", ["svg", "png", "txt"])
def test_both_are_drawn(path, tmp_path, kind):
    if kind != "txt":
        pytest.importorskip("matplotlib")
    run(path, "--out", tmp_path / f"both.{kind}")
    assert (tmp_path / f"both.{kind}").stat().st_size > 1000


def test_both_are_inside_of_the_picture_one_above_the_other(steady, monkeypatch):
    picture = pytest.importorskip("mpitrain.commands.schedule.picture", reason="needs matplotlib")
    frames = []
    monkeypatch.setattr(picture.Frame, "render", lambda frame, kind: frames.append(frame))
    picture.draw_measured(Measurement(read(steady)), "png")
    above, below = (axes.get_position() for axes in frames[0].figure.axes)
    assert 0 < below.y0 < below.y1 < above.y0 < above.y1 < 1


def test_a_step_that_was_slow_is_in_no_median():
    steps = {step: [played("1f1b", 3 if step == 4 else 0.1, step)] for step in range(1, 7)}
    measurement = Measurement(read(trace(steps)))
    assert (
        measurement.simulations[2].makespan > 1.5 * measurement.makespan
        and abs(measurement.difference) < 0.03
    )


# ---------------------------------------------------------------- damage


def _drop(kind):
    def damage(content):
        events = content["traceEvents"]
        content["traceEvents"] = [event for event in events if not event["name"].startswith(kind)]

    return damage


def _set(position, **values):
    return lambda content: content["traceEvents"][position].update(values)


def _only_rank_1(content):
    content["traceEvents"] = [event for event in content["traceEvents"] if event["tid"] == 1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.pop("traceEvents"), "found no list of traceEvents"),
        (lambda content: content.update(traceEvents=[]), "found no instructions"),
        (_set(5, name="F3"), "F3"),
        (_set(5, name=None), "event 5 is damaged"),
        (_set(5, dur=-1), "event 5 is damaged"),
        (_set(5, dur="long"), "event 5 is damaged"),
        (_set(5, ts=float("nan")), "event 5 is damaged"),
        (_set(5, args={}), "event 5 is damaged"),
        (_set(5, tid="rank 1"), "event 5 is damaged"),
        (_set(-40, name="F7@0"), "different programs"),
        (_only_rank_1, "one is missing"),
        (_drop("SEND_F3"), "can never start"),
        (lambda content: content["otherData"].update(segments=0), "segments 0"),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path, steady, damage, message):
    damage(steady)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(steady))
    with pytest.raises(InputError, match=message) as caught:
        run(path)
    assert caught.value.exit_code == BAD_INPUT
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"traceEvents": 3}'])
def test_what_is_no_trace_is_refused(text):
    with pytest.raises(ScheduleError, match=r"needed a trace\.json"):
        read_trace(text)


def test_schedules_are_planned_with_a_trace(path):
    found = json.loads(run(path, "--stages", "4", "--json"))
    assert {"1f1b", "zbv"} <= {one["schedule"] for one in found["schedules"]}
    done = CliRunner().invoke(cli, ["schedule", "plain-auto", "--trace", str(path), "--json"])
    planned = json.loads(done.stdout)
    assert planned["stages"] == 4 and planned["microbatches"] == 8
    assert planned["stage_times"][1] == pytest.approx([2, 2.5, 2.5], rel=0.2)


def test_a_trace_that_cannot_be_used_is_refused(path, tmp_path):
    with pytest.raises(InputError, match="both say how long stages take"):
        run(path, "--times", "1,1,1,0", "--stages", 4)
    with pytest.raises(InputError, match="can't be read"):
        run(tmp_path / "missing.json")
