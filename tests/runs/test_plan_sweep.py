"""`mpitrain sweep`: layouts of one's own are measured in one job, and what can't run is named."""

import csv
import json
from types import SimpleNamespace

import pytest
from conftest import LONG
from launch import MPITRAIN, mpirun, tail

from mpitrain.commands.plan.measured_steps import MeasuredStep
from mpitrain.plan.predict.step_time.tiles import fitted

MODEL = ("--set", "model.layers=2", "--set", "batch.global=8", "--set", "data.sequence=64", "--steps", "2")
KEYS = {"layout", "measured_s", "predicted_s", "speed", "tokens_per_s", "held_gb", "expert_load", "refused"}


def test_layouts_are_measured_and_what_cannot_run_is_named(tmp_path):
    file = tmp_path / "layouts.txt"
    file.write_text(
        "# two\nparallel.tp=3  # of two ranks\n\nparallel.dp=2 parallel.zero=3\n", encoding="utf-8"
    )
    out = tmp_path / "rows.csv"
    words = ("--layout", "parallel.pp=2", "--layouts", str(file), "--out", str(out))
    done = mpirun(2, MPITRAIN, "sweep", *MODEL, *words)
    assert done.returncode == 0, tail(done.output)
    title, head, *lines, refused = done.output.strip().splitlines()
    assert title.startswith("2 of 3 layouts on 2 ranks, fastest first; step times are medians of 2")
    assert head.split()[:4] == ["measured", "s", "predicted", "s"]
    assert refused.startswith(
        "refused: parallel.tp=3: parallel.tp = 3 x parallel.cp = 1, but mpirun started 2"
    )
    with open(out, encoding="utf-8") as text:
        rows = {row["layout"]: row for row in csv.DictReader(text)}
    assert list(rows) == ["parallel.pp=2", "parallel.tp=3", "parallel.dp=2 parallel.zero=3"]
    fastest_first = []
    for line in lines:
        took, predicted, ratio, speed, tokens, held, layout = line.split(maxsplit=6)
        row = rows[layout]
        assert float(took) == pytest.approx(float(row["measured_s"]), rel=0.01)
        assert float(predicted) == pytest.approx(float(row["predicted_s"]), rel=0.01)
        assert float(ratio) == pytest.approx(float(row["measured_s"]) / float(row["predicted_s"]), rel=0.01)
        assert float(speed) == pytest.approx(float(row["speed"]), rel=0.01)
        assert 0 < float(speed) < 100
        assert float(tokens.replace(",", "")) == pytest.approx(8 * 64 / float(row["measured_s"]), rel=0.01)
        assert float(held) == pytest.approx(float(row["held_gb"]), rel=0.01)
        fastest_first.append(float(row["measured_s"]))
    assert len(lines) == 2 and fastest_first == sorted(fastest_first)
    assert rows["parallel.tp=3"]["measured_s"] == ""


def test_json_is_one_object():
    done = mpirun(1, MPITRAIN, "sweep", *MODEL, "--layout", "memory.recompute=full", "--json")
    assert done.returncode == 0, tail(done.output)
    tree = json.loads(done.output)
    (row,) = tree["layouts"]
    assert (tree["ranks"], tree["machine"], tree["steps"]) == (1, "laptop", 2)
    assert set(row) == KEYS and row["layout"] == "memory.recompute=full" and not row["refused"]
    assert row["tokens_per_s"] == pytest.approx(8 * 64 / row["measured_s"])


def test_sweep_prints_the_load_of_experts_of_each_layout(tmp_path):
    out = tmp_path / "rows.csv"
    experts = ("model.family=mixtral", "experts.count=4", "experts.active=1", "batch.micro=2")
    words = [word for each in experts for word in ("--set", each)]
    layouts = ("parallel.ep=1", "parallel.ep=2", "parallel.ep=2 run.expert_load=2")
    words += [word for layout in layouts for word in ("--layout", layout)]
    done = mpirun(2, MPITRAIN, "sweep", *MODEL, *words, "--out", str(out))
    assert done.returncode == 0, tail(done.output)
    title, head, *lines = done.output.strip().splitlines()
    assert "load: rows of the most loaded ep rank" in title
    assert head.split()[-2:] == ["load", "layout"] and len(lines) == 3
    with open(out, encoding="utf-8") as text:
        alone, *folded = csv.DictReader(text)
    assert alone["expert_load"] == ""
    loads = [float(row["expert_load"]) for row in folded]
    assert loads[0] == loads[1] and 1 <= loads[0] <= 2
    # the second is predicted with all rows on one rank
    assert float(folded[1]["predicted_s"]) > float(folded[0]["predicted_s"])


@pytest.mark.parametrize(("compute", "speed"), [("bf16", 0.75), ("fp8", 0.75), ("fp64", None)])
def test_speed_is_a_share_of_what_the_machines_file_says(compute, speed):
    plan = SimpleNamespace(config=SimpleNamespace(precision=SimpleNamespace(compute=compute)))
    rates = SimpleNamespace(products={"bf16": 4e12, "fp8": 8e12}, tiles={})
    measured = MeasuredStep(seconds=1.0, waiting_s=0.0, products=3e12, expert_load=None)
    assert measured.speed(plan, rates) == speed
    exact, rates.tiles["bf16"] = fitted(4e12, 3e12)
    rates.products["bf16"] = exact
    assert exact > 4e12 and measured.speed(plan, rates) == (speed and pytest.approx(speed))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param((), "needed layouts: --layout", marks=LONG),
        (("--layout", "paralel.pp=2"), "unknown key paralel"),
        pytest.param(("--layout", "parallel.pp='2"), "No closing quotation", marks=LONG),
        (("--layout", "parallel.pp=2", "--out", "no/rows.csv"), "--out no/rows.csv: no folder no; needed"),
        (("--layouts", "no-such.txt"), "--layouts no-such.txt: No such file or directory; give a text file"),
        pytest.param(
            ("--layout", "parallel.pp=2", "--machine", "no-such"),
            "machine no-such: found no such machine",
            marks=LONG,
        ),
    ],
)
def test_what_was_typed_wrong_is_said_once(words, message):
    done = mpirun(2, MPITRAIN, "sweep", *MODEL, *words)
    assert done.returncode == 2 and done.output.count(message) == 1, tail(done.output)
