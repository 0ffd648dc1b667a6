"""The table at the end of a run: what was predicted of a step, and what was measured."""

import json
import re
from statistics import median

import pytest
from launch import MPITRAIN, mpirun
from pages import ROOT

from mpitrain.actor.rehearsal import Rehearsal
from mpitrain.comm.meters.account import AxisUsage
from mpitrain.commands.inspect import planned
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step import predict_step
from mpitrain.plan.predict.step_time.step_model import step_model
from mpitrain.planner import after_run
from mpitrain.planner.measured_run import MeasuredRun

SMALL = (
    "model.layers=4", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn=96",
    "data.sequence=16", "batch.global=8", "run.steps=4", "run.eval_batches=1",
)  # fmt: skip
COUNTED = 9


def measured(*keys, ranks=4, gpu="", peak=100e9, usages=None, held=2_000_000):
    """Return a run whose peak is that of a laptop, unless it is given."""
    plan = planned(None, (*SMALL, *keys), ranks)
    usages = usages or [{}] * ranks
    return MeasuredRun(plan, 0.5, 10, usages, COUNTED, ranks, ranks, gpu, peak, 1_000_000, held)


def cells(table):
    """Return {column: (predicted, measured)}; the name of a column may have spaces."""
    head, *rows = (re.split(r"  +", line.strip()) for line in table.splitlines()[:3])
    assert [row[0] for row in rows] == ["predicted", "measured"]
    return {name: (rows[0][i], rows[1][i]) for i, name in enumerate(head) if i}


def usage(blocked_s, num_bytes=0):
    return AxisUsage(1, num_bytes * COUNTED, blocked_s * COUNTED)


def compare(run):
    return after_run.compare(run, after_run.step_terms(run))


def test_a_cpu_that_is_twice_as_fast_computes_in_half_the_time():
    times = [float(cells(compare(measured(ranks=1, peak=peak)))["computing"][0]) for peak in (50e9, 100e9)]
    assert times[0] == pytest.approx(2 * times[1], rel=0.05)
    assert 'profile "laptop", scaled to this rank\'s peak (50 GFLOP/s)' in compare(measured(peak=50e9))


def test_parts_are_those_of_the_rank_that_waited_least():
    busy = {"links": usage(0.02, 3_000_000), "model": usage(0.01), "tp": usage(0.04), "shard": usage(0.005)}
    waiting = {"links": usage(0.3, 1_000_000)}
    table = compare(measured("parallel.pp=2", "parallel.tp=2", usages=[waiting, busy, waiting, waiting]))
    found = {name: cell for name, (_, cell) in cells(table).items()}
    assert found == {
        "all": "500.0", "computing": "425.0", "pp": "30.0", "tp": "40.0", "dp": "5.0",
        "MB sent": "1", "MB held": "2",
    }  # fmt: skip
    assert len(table.splitlines()) <= 8


@pytest.mark.parametrize(
    ("usages", "part"), [([{"links": usage(0.45)}] * 4, "waiting for pp"), (None, "computing")]
)
def test_the_part_that_is_off_most_is_named(usages, part):
    run = measured("parallel.pp=2", "parallel.tp=2", usages=usages)
    table = compare(run)
    rates = machine_of(find_machine("laptop"))
    config = run.plan.config
    found = predict_step(step_model(run.plan), layout_of(config, rates), rates)
    predicted_s = found.times(rates.spread.middle).seconds
    assert cells(table)["all"][0] == f"{1e3 * predicted_s:,.1f}"
    assert f"measured / predicted {0.5 / predicted_s:.2f}, largest difference: {part} +" in table


@pytest.mark.parametrize(
    ("keys", "gpu", "why"),
    [
        ((), "Frobnicator 9", "found no machine of jobs/machines/ like Frobnicator 9; set run.machine"),
        (("run.machine=gone.toml",), "", "machine gone.toml: No such file or directory"),
    ],
)
def test_what_cannot_be_predicted_says_why_and_the_rest_stays(keys, gpu, why):
    table = compare(measured("parallel.pp=2", *keys, gpu=gpu, held=None))
    assert f"no step is predicted: {why}" in table and "measured /" not in table
    found = cells(table)
    assert found["all"] == ("-", "500.0") and found["computing"] == ("-", "500.0")
    assert float(found["MB sent"][0]) > 0 and found["MB held"] == ("1", "-")


def test_a_rehearsal_that_fails_does_not_end_a_run(monkeypatch):
    def fail(_):
        raise RuntimeError("a layer of my own")

    monkeypatch.setattr(Rehearsal, "sent", fail)
    table = compare(measured("parallel.pp=2"))
    assert "no bytes are predicted: RuntimeError('a layer of my own')" in table and "measured / " in table
    assert cells(table)["MB sent"] == ("-", "0")


def test_bytes_are_predicted_of_a_run_that_measures_the_noise_scale():
    table = compare(measured("parallel.dp=2", "run.noise_scale=true"))
    assert "no bytes are predicted" not in table and float(cells(table)["MB sent"][0]) > 0


def test_a_long_program_is_not_rehearsed():
    table = compare(measured("parallel.pp=2", "batch.global=4096"))
    assert "to predict traffic" in table and cells(table)["MB sent"][0] == "-"
    assert len(table.splitlines()) <= 8


def test_a_gpu_has_the_figures_of_one_like_it():
    keys = "precision.compute=bf16", "run.device=cuda"
    assert "predicted by the figures of NVIDIA H100" in compare(measured(*keys, gpu="NVIDIA H100 80GB HBM3"))


def test_a_run_of_one_step_has_no_table():
    assert compare(measured()._replace(num_steps=0)) == ""


def test_the_end_of_a_run_has_it(tmp_path):
    """Its figures are those of metrics.jsonl, of the memory table, and of the machine's file."""
    file = tmp_path / "mine.toml"
    laptop = (ROOT / "jobs" / "machines" / "laptop.toml").read_text()
    file.write_text(laptop.replace(f'name = "{find_machine("laptop").name}"', 'name = "mine"'))
    keys = (*SMALL, "parallel.pp=2", f"run.machine={file}", f"run.dir={tmp_path / 'run'}")
    done = mpirun(2, MPITRAIN, "run", *(word for key in keys for word in ("--set", key)))
    assert done.returncode == 0, done.output
    lines = done.output.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("  step, ms"))
    assert lines[begin + 3].startswith("  predicted by the figures of mine; measured / predicted ")
    found = cells("\n".join(lines[begin:]))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][2:]
    assert found["all"][1] == f"{1e3 * median(step['step_s'] for step in steps):,.1f}"
    sent = sum(axis["bytes"] for step in steps for axis in step["comm"].values()) / len(steps)
    assert float(found["MB sent"][1]) == pytest.approx(sent / 1e6, rel=0.01)
    assert found["MB sent"][0] == found["MB sent"][1]
    resident = next(line.split()[-2:] for line in lines if "peak resident" in line)
    assert [round(float(each)) for each in resident] == [int(each) for each in found["MB held"]]


def test_a_machine_that_is_not_there_is_refused_before_a_run_begins(tmp_path):
    run_dir = tmp_path / "run"
    keys = ("run.machine=frobnicator", f"run.dir={run_dir}")
    done = mpirun(1, MPITRAIN, "run", *(word for key in keys for word in ("--set", key)))
    assert done.returncode == 2 and "machine frobnicator: found no such machine" in done.output
    assert not run_dir.exists()
