"""`mpitrain plan --timeline`: the predicted step as a trace, in the numbers of the prediction."""

import json
import sys

import pytest
from click.testing import CliRunner
from launch import finished
from public_models import public_model

from mpitrain.cli import cli
from mpitrain.commands.plan.timeline_file import as_trace
from mpitrain.errors import ConfigError
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.predicted_timeline import predict_timeline
from mpitrain.plan.predict.step_time.step import STRAGGLERS, predict_step
from mpitrain.schedules.actions import parse

H100 = machine_of(find_machine("h100-80gb"))
MODEL = public_model("llama3-8b")
SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("dualpipe", 1), ("seq1f1b", 1)]
OPTIONS = ("model.preset=llama3-8b", "data.sequence=8192", "batch.global=64", "precision.compute=bf16",
           "parallel.pp=4")  # fmt: skip


def layout_of(schedule: str, chunks: int = 1, pp: int = 4, batch: int = 64) -> StepLayout:
    segments = 2 if schedule == "seq1f1b" else 1
    ranks = 8 * pp
    return StepLayout(ranks, 8192, batch, tp=2, pp=pp, schedule=schedule, chunks=chunks, segments=segments)


def spans(layout: StepLayout, category: str) -> dict[int, list[dict]]:
    """Return the events of a category by rank."""
    events = as_trace(predict_timeline(MODEL, layout, H100), "")["traceEvents"]
    found = {rank: [] for rank in range(layout.pp)}
    for event in events:
        if event["ph"] == "X" and event["cat"] == category:
            found[event["tid"]].append(event)
    return found


@pytest.mark.parametrize(("schedule", "chunks", "pp"), [*((*each, 4) for each in SCHEDULES), ("1f1b", 1, 1)])
def test_a_timeline_adds_up_to_the_prediction(schedule, chunks, pp):
    layout = layout_of(schedule, chunks, pp, batch=16 * pp)
    found = predict_step(MODEL, layout, H100)
    ends = [event["ts"] + event["dur"] for row in spans(layout, "other").values() for event in row]
    assert max(ends) / 1e6 * (1 + STRAGGLERS) == pytest.approx(found.seconds, rel=1e-9)
    computed = [sum(event["dur"] for event in row) / 1e6 for row in spans(layout, "compute").values()]
    inside = found.computing + found.exposed["tp"]
    assert max(computed) == pytest.approx(inside, rel=1e-9)
    exposed = spans(layout, "exposed")
    tp = [
        sum(event["dur"] for event in row if event["name"] == "exposed tp") / 1e6 for row in exposed.values()
    ]
    assert max(tp) == pytest.approx(found.exposed["tp"], rel=1e-9) and found.exposed["tp"] > 0


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_exposed_messages_lie_within_a_computation(schedule, chunks):
    layout = layout_of(schedule, chunks)
    computed = spans(layout, "compute")
    for rank, row in spans(layout, "exposed").items():
        for event in row:
            around = [
                each
                for each in computed[rank]
                if each["ts"] - 1e-3 <= event["ts"]
                and event["ts"] + event["dur"] <= each["ts"] + each["dur"] + 1e-3
            ]
            assert len(around) == (event["name"] != "exposed dp")


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_an_arrow_leads_from_the_stage_before_to_the_next(schedule, chunks):
    layout = layout_of(schedule, chunks)
    computed = spans(layout, "compute")
    events = as_trace(predict_timeline(MODEL, layout, H100), "")["traceEvents"]
    arrows = [event for event in events if event.get("cat") == "message" and event["ph"] in "sf"]
    assert arrows
    for send, receive in zip(arrows[::2], arrows[1::2], strict=True):
        assert (send["ph"], receive["ph"]) == ("s", "f") and send["id"] == receive["id"]
        assert send["ts"] < receive["ts"]
        maker = parse(_around(computed[send["tid"]], send["ts"]))
        action = parse(send["name"])
        step = -1 if action.kind == "RECV_F" else 1
        assert (maker.index, maker.stage) == (action.index, action.stage + step)
        assert (maker.kind == "F") == (action.kind == "RECV_F")


def _around(row: list[dict], time: float) -> str:
    return next(each["name"] for each in row if each["ts"] < time < each["ts"] + each["dur"])


def test_of_many_microbatches_the_first_are_played():
    trace = as_trace(predict_timeline(MODEL, layout_of("1f1b", batch=1024), H100), "many")
    assert trace["otherData"]["microbatches"] == 256 > trace["otherData"]["played"] == 16
    assert trace["traceEvents"][0]["args"]["name"] == "predicted, the first 16 of 256 microbatches: many"


def test_a_schedule_of_ones_own_is_refused():
    with pytest.raises(ConfigError, match=r"none of the catalogue; fix another pipeline\.schedule"):
        predict_timeline(MODEL, layout_of("mine.csv"), H100)


def planned(path, *more: str):
    overrides = [word for each in OPTIONS for word in ("--set", each)]
    words = ["plan", "--ranks", "32", "--machine", "h100-80gb", "--timeline", str(path), *overrides, *more]
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize("name", ["step.json", "step.svg"])
def test_the_command_writes_it(tmp_path, name):
    done = planned(tmp_path / name)
    assert done.exit_code == 0 and "the step of layout 1 is written to" in done.output
    text = (tmp_path / name).read_text()
    if name == "step.json":
        assert {event["tid"] for event in json.loads(text)["traceEvents"]} == {0, 1, 2, 3}
    else:
        assert "<svg" in text and "</svg>" in text


@pytest.mark.parametrize(
    ("name", "words"), [("step.txt", "needed one of .json .svg"), ("none/step.json", "no folder")]
)
def test_another_kind_or_place_is_refused(tmp_path, name, words):
    done = planned(tmp_path / name)
    assert isinstance(done.exception, ConfigError) and words in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_torch_is_not_imported(tmp_path):
    words = ["plan", "--ranks", "32", "--timeline", str(tmp_path / "step.json")]
    words += [word for each in OPTIONS for word in ("--set", each)] + ["--machine", "h100-80gb"]
    code = (
        "import sys\nfrom mpitrain.cli import cli\n"
        f"cli({words}, standalone_mode=False)\nprint('torch' in sys.modules)"
    )
    done = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
