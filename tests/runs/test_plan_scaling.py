"""`mpitrain sweep --scaling`: steps on the first ranks of a job, measured and predicted; pictures of both."""

import csv
import json
import re
from collections import Counter

import pytest
from conftest import LONG
from launch import MPITRAIN, mpirun, run_commands, tail

from mpitrain.commands.plan.layout_sweep import two_keys
from mpitrain.commands.plan.sweep_layouts import ScaledStep
from mpitrain.commands.plan.sweep_picture import heat_map, scaling_curves
from mpitrain.errors import ConfigError

MODEL = ("--set", "model.layers=2", "--set", "data.sequence=64", "--steps", "2")
BATCH = ("--set", "batch.global=8")


@LONG
def test_the_first_ranks_take_steps_while_others_wait(tmp_path):
    out, svg = tmp_path / "rows.csv", tmp_path / "curves.svg"
    words = ("--layout", "parallel.pp=1", "--out", str(out), "--svg", str(svg))
    strong, weak = run_commands(
        3,
        ["sweep", *MODEL, *BATCH, "--scaling", "strong", "--over", "2,1", *words],
        ["sweep", *MODEL, *BATCH, "--scaling", "weak", "--json"],
    )
    assert strong.returncode == 0, tail(strong.output)
    title, head, *lines = strong.output.strip().splitlines()
    assert title.startswith("strong scaling over the first ranks of 3; a step is the median of 2")
    assert head.split()[:4] == ["ranks", "batch", "measured", "s"]
    with open(out, encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    assert [(row["ranks"], row["batch"]) for row in rows] == [("1", "8"), ("2", "8")]
    for line, row in zip(lines, rows, strict=True):
        cells = line.split()
        assert float(cells[2]) == pytest.approx(float(row["measured_s"]), rel=0.01)
        assert float(cells[6]) == pytest.approx(float(row["efficiency"]), abs=0.01)
        assert float(row["tokens_per_s"]) == pytest.approx(8 * 64 / float(row["measured_s"]))
    speeds = [float(row["tokens_per_s"]) for row in rows]
    assert [float(row["efficiency"]) for row in rows] == pytest.approx([1, speeds[1] / speeds[0] / 2])
    assert float(rows[0]["waiting_s"]) == 0 < float(rows[1]["waiting_s"]) < float(rows[1]["measured_s"])
    drawn = svg.read_text(encoding="utf-8")
    assert drawn.startswith("<?xml") and "strong scaling" in drawn and "parallel.pp=1" in drawn

    assert weak.returncode == 0, tail(weak.output)
    tree = json.loads(weak.output)
    assert (tree["ranks"], tree["scaling"]) == (3, "weak")
    assert [(row["ranks"], row["batch"]) for row in tree["rows"]] == [(1, 8), (2, 16), (3, 24)]
    assert set(tree["rows"][0]) == set(ScaledStep._fields)


def test_what_no_number_of_ranks_can_have_is_said_before_a_step():
    asked = {
        ("--over", "1,3"): "--over 1,3: found 3; needed numbers from 1 to 2, the started ranks, such as 1,2",
        ("--over", "1,1"): "--over 1,1: found one twice",
        ("--over", "1,"): "--over 1,: found no number",
        (
            "--set",
            "batch.global=7",
            "--layout",
            "parallel.pp=1",
        ): "on 2 ranks, parallel.pp=1: batch.global = 7",
        ("--scaling", "weak", "--over", "2", "--svg", "a.pdf"): "--svg a.pdf: found '.pdf'",
    }
    commands = [["sweep", *MODEL, *BATCH, "--scaling", "strong", *words] for words in asked]
    for done, message in zip(run_commands(2, *commands), asked.values(), strict=True):
        assert done.returncode == 2 and done.output.count(message) == 1, tail(done.output)


def test_an_option_of_scaling_does_nothing_for_layouts():
    done = mpirun(1, MPITRAIN, "sweep", "--layout", "parallel.pp=1", "--over", "1")
    assert done.returncode == 2 and "--over 1 does nothing without --scaling" in done.output


def test_a_heat_map_has_the_two_keys_in_which_layouts_differ():
    layouts = [f"parallel.dp=1 batch.micro={micro} parallel.pp={pp}" for micro in (1, 2) for pp in (1, 2)]
    assert two_keys("a.svg", layouts) == ("batch.micro", "parallel.pp")
    assert two_keys("a.svg", ["a=1", "b=2"]) == ("a", "b")  # where a key isn't, it is the default
    for wrong in (layouts[:2], ["a=1 b=1 c=1", "a=2 b=2 c=2"]):
        with pytest.raises(ConfigError, match="a heat map needs two"):
            two_keys("a.svg", wrong)


def test_a_heat_map_says_each_cell():
    measured = {("1", "2"): 3111.0, ("1", "16"): 4030.0, ("2", "2"): None}
    drawn = heat_map(("parallel.pp", "batch.micro"), measured, {("1", "2"): 7000.0}, "tokens/s").decode()
    said = re.findall(r">([^<>]+)</text>", drawn)
    for text in ("3,111", "4,030", "7,000", "-", "parallel.pp", "batch.micro"):
        assert text in said
    assert said.index("2") < said.index("16")  # numbers by size, not by letters


def test_curves_of_a_layout_are_measured_and_predicted():
    row = ScaledStep("", 1, "dp 1", 8, 1.0, 0.9, 8.0, 8.9, 1.0, 1.0, 0.0, 0.0)
    more = row._replace(ranks=2, tokens_per_s=12.0, efficiency=0.75)
    drawn = scaling_curves({"": [row, more]}, "weak").decode()
    words = Counter(re.findall(r">([^<>]+)</text>", drawn))
    assert (
        words["weak scaling"] == words["the default layout"] == words["measured"] == words["predicted"] == 1
    )
