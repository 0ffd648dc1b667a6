"""`mpitrain plan --measure`: the layouts that were found take steps on the ranks that ask."""

import re

import pytest
from conftest import LONG
from launch import MPITRAIN, mpirun, tail

MODEL = ("--set", "model.layers=2", "--set", "batch.global=8", "--set", "data.sequence=64")
ROW = re.compile(r"^ +(\d)\. +(\S+) +(\S+) +(\S+)  (dp .*|tp .*|pp .*)$", re.M)


def test_two_layouts_are_measured_and_compared_with_what_was_predicted(tmp_path):
    out = tmp_path / "best.toml"
    done = mpirun(2, MPITRAIN, "plan", "--measure", "2", *MODEL, "--out", str(out))
    assert done.returncode == 0, tail(done.output)
    planned, _, measured = done.output.partition("\nmeasured on 2 ranks, the median of 5 steps:\n")
    rows = ROW.findall(measured)
    assert [number for number, *_ in rows] == ["1", "2"], done.output
    for _, predicted, took, ratio, layout in rows:
        assert float(ratio) == pytest.approx(float(took) / float(predicted), rel=0.05)
        assert 1e-4 < float(took) < 60 and layout in planned
    assert out.exists() and "written to" in planned


@LONG
def test_a_pipeline_with_experts_over_ranks_takes_steps():
    """Ranks of the last stage read targets only."""
    keys = (
        "parallel.pp=2",
        "model.family=mixtral",
        "experts.count=4",
        "experts.active=2",
        "experts.width=32",
    )
    words = [word for key in keys for word in ("--set", key)]
    done = mpirun(2, MPITRAIN, "plan", "--measure", "1", *MODEL, *words)
    assert done.returncode == 0 and len(ROW.findall(done.output)) == 1, tail(done.output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("--node-hours", "9"), "--node-hours does nothing without --tokens", marks=LONG),
        pytest.param(("--json",), "--measure does nothing with --json; leave it out", marks=LONG),
        (("--ranks", "3"), "--ranks 3 with --measure: found 2 ranks started; leave --ranks out"),
        pytest.param(("--machine", "no-such"), "machine no-such: found no such machine", marks=LONG),
        pytest.param(("--set", "parallel.tp=3"), "parallel.tp = 3", marks=LONG),
    ],
)
def test_what_cannot_be_done_is_said_once(words, message):
    done = mpirun(2, MPITRAIN, "plan", "--measure", "1", *MODEL, *words)
    assert done.returncode == 2 and done.output.count(message) == 1, tail(done.output)


def test_the_back_test_measures_nothing():
    done = mpirun(2, MPITRAIN, "plan", "backtest", "x.csv", "--measure", "1")
    assert done.returncode == 2, tail(done.output)
    assert done.output.count("--measure does nothing with backtest; leave it out") == 1
