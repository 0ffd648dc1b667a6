"""What a run writes has words in the reference, and what has words is written."""

import json
import math
import sys

import pytest
from folders import ROOT
from launch import MPITRAIN, mpirun, tiny, write_text

from mpitrain.commands.job import again

sys.path.append(str(ROOT / "docs"))
from building.outputs import fields_of

# more than one run writes: of dynamic loss scaling, spikes, rollbacks, saves that fail or remove
SOMETIMES = {
    "evaluations",
    "samples",
    "grad_signal",
    "grad_noise",
    "loss_scale",
    "spike",
    "rollbacks",
    "saves[].removed",
    "saves[].not_saved",
}
EXPERTS = dict(
    model_family="mixtral", experts_count=4, experts_active=2, model_mtp=1, pipeline_schedule="1f1b"
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two steps with all that is written: experts, further tokens, a save, a trace, an end."""
    folder = tmp_path_factory.mktemp("outputs")
    text = write_text(folder / "text.txt")
    settings = dict(run_steps=3, run_save_every=1, run_save="blocking", run_trace=2, parallel_dp=2, **EXPERTS)
    options = tiny(folder / "run", text, **settings)
    done = mpirun(2, MPITRAIN, "run", *options)
    assert done.returncode == 0, done.output
    overrides = tuple(word for word in options if word != "--set")
    again.main(75, None, overrides, 100)
    return folder / "run"


def names(value: object, prefix: str = "") -> set[str]:
    """Return the names of fields as the reference has them: comm.AXIS.calls, saves[].step."""
    found = set()
    for key, inside in value.items():
        found.add(f"{prefix}{key}")
        if key == "comm":
            found |= {name for axis in inside.values() for name in names(axis, "comm.AXIS.")}
        elif key == "saves":
            found |= {name for each in inside for name in names(each, "saves[].")}
    return found


def test_every_field_of_metrics_is_in_the_reference(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    written = set().union(*map(names, lines))
    known = set(fields_of("metrics.jsonl"))
    assert written <= known, written - known
    assert known - written <= SOMETIMES, known - written


def test_every_field_of_a_trace_is_in_the_reference(run_dir):
    trace = json.loads((run_dir / "trace.json").read_text())
    events = set().union(*trace["traceEvents"])
    counted = set().union(*(event["args"] for event in trace["traceEvents"])) - {"step", "name"}
    written = {*trace, *trace["otherData"], *(f"traceEvents[].{key}" for key in events)}
    written |= {f"traceEvents[].args.{key}" for key in counted}
    assert written <= set(fields_of("trace.json")), written


def test_every_field_of_a_summary_is_in_the_reference(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    axes = summary["axes"]
    assert len(summary["nodes"]) == math.prod(axes.values())
    assert names(summary) - {f"axes.{name}" for name in axes} == set(fields_of("summary.json"))


def test_every_field_of_an_end_is_in_the_reference(run_dir):
    assert set(json.loads((run_dir / "ends.jsonl").read_text())) == set(fields_of("ends.jsonl"))
