"""The back-test: rows that are refused, bounds where what decides is unknown, fits that don't flatter."""

import csv
import json
import math
import random
import re
from importlib import resources

import pytest
from click.testing import CliRunner
from folders import ROOT

from mpitrain.cli import cli
from mpitrain.commands.plan.backtest import backtest
from mpitrain.errors import ConfigError
from mpitrain.plan.predict.step_time.machine import OF_SHEETS, read_machine
from mpitrain.plan.predict.step_time.step_model import works_of
from mpitrain.planner.backtest_errors import predict_rows
from mpitrain.planner.fitted import Sample, fit, quantile, rank_correlation
from mpitrain.planner.published_rows import read_rows

EXAMPLE = ROOT / "benchmarks/published_layouts.csv"
UNSEEN = ROOT / "benchmarks/unseen_layouts.csv"
FIELDS = [
    "id", "system", "model", "layers", "hidden", "heads", "vocab", "params_b", "seq", "gbs_seqs", "mbs",
    "n_microbatches", "gpus", "gpu_type", "tp", "cp", "pp", "vpp", "dp", "ep", "zero", "recompute",
    "schedule", "dispatcher",
    "ffn", "n_experts", "topk", "precision", "mfu_pct", "tflops_gpu", "tok_s_gpu", "iter_s", "mem_gb",
    "role", "note", "half", "source", "dp_shard", "node_gbit",
]  # fmt: skip
PLAIN = dict(
    id="x", system="Megatron-LM SP+selective", model="GPT 22B", seq=2048, gbs_seqs=4, mbs=4, gpus=8,
    gpu_type="A100-80GB", tp=8, pp=1, recompute="selective", iter_s=1.1, half="test",
)  # fmt: skip


def written(tmp_path, *rows):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def read_one(tmp_path, **changes):
    rows, refused = read_rows(written(tmp_path, {**PLAIN, **changes}))
    return (rows or refused)[0]


@pytest.mark.parametrize(("rows", "said"), [((), "0 rows, none"), (({**PLAIN, "gpus": 7},), "of the first:")])
def test_a_file_without_a_row_that_can_be_predicted_is_refused(tmp_path, rows, said):
    with pytest.raises(ConfigError, match=said):
        backtest(written(tmp_path, *rows))


def test_a_plain_row_is_predicted(tmp_path):
    row = read_one(tmp_path)
    assert row.model.sizes.layers == 48 and row.layout.recompute == "selective" and not row.layout.flash
    assert row.measured.seconds == 1.1 and not row.is_interval and not row.fitted


@pytest.mark.parametrize(
    ("changes", "why", "incomplete"),
    [
        (dict(model="GPT-9"), "no public model", True),
        (dict(gbs_seqs="", mbs=""), "needed the batch", True),
        (dict(gpu_type=""), "needed the machine", True),
        (dict(tp="", pp=""), "needed the layout", True),
        (dict(iter_s=""), "neither a throughput nor memory", True),
        (dict(params_b=70), "contradicts its sizes", False),
        (dict(dp=3), "contradicts its 8 GPUs", False),
        (dict(mbs=4, n_microbatches=3), "contradicts gbs_seqs", False),
        (dict(tok_s_gpu=10), "contradicts tok_s_gpu", False),
        (dict(iter_s="", mfu_pct=140), "more than its peak", False),
        (dict(mem_gb=300), "contradicts NVIDIA A100", False),
        (dict(tp=3), "doesn't divide its 8 GPUs", False),
        (dict(iter_s="fast"), "needed a number", False),
        (dict(iter_s=-1), "not negative", False),
        (dict(seq="2048.5"), "whole number", False),
        (dict(gpu_type="TPU v9"), "no such machine", False),
        (dict(gpu_type="{own}"), "no such machine", False),
        (dict(iter_s="1e-320"), "from 1e-9 to 1e15", False),
        (dict(iter_s="", tok_s_gpu="1e308"), "from 1e-9 to 1e15", False),
        (dict(iter_s="nan"), "from 1e-9 to 1e15", False),
        (dict(heads=10**9), "a number for each head", False),
        (dict(layers=10**6), "needed 16384 at most", False),
        (dict(model="Mixtral 8x7B", topk=9), "topk = 9 of n_experts = 8", False),
        (
            dict(model="x", layers=2, hidden=64, heads=4, ffn=64, n_experts=4, topk=5),
            "topk = 5 of n_exp",
            False,
        ),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_predicted_is_refused_in_words(tmp_path, changes, why, incomplete):
    own = tmp_path / "own.toml"  # no row opens a file
    own.write_text((resources.files("mpitrain.jobs") / "machines/a100-80gb.toml").read_text())
    changes = {key: own if value == "{own}" else value for key, value in changes.items()}
    found = read_one(tmp_path, **changes)
    assert why in found.why and "\n" not in found.why and found.incomplete == incomplete


def test_unknown_recomputation_makes_bounds(tmp_path):
    row = read_one(tmp_path, system="a framework of tomorrow", recompute="")
    assert [each.recompute for each in row.layouts] == ["none", "full"]
    assert row.assumed["recompute"] == "none to full"


def test_an_unknown_microbatch_makes_bounds_with_zero_3_only(tmp_path):
    known = dict(tp=1, gbs_seqs=64, mbs="", recompute="full")
    assert [each.micro for each in read_one(tmp_path, zero="FSDP", **known).layouts] == [1, 2, 4, 8]
    assert [each.micro for each in read_one(tmp_path, zero="1", **known).layouts] == [1]


def test_what_counts_recomputation_is_read_so(tmp_path):
    """HFU read as MFU is 30 % of a step."""
    hfu, mfu = (
        read_one(tmp_path, system=system, iter_s="", tflops_gpu=140, recompute="full").measured.seconds
        for system in ("Megatron-LM PTD-P", "Megatron-LM SP+selective")
    )
    assert 1.25 < hfu / mfu < 1.4


def test_the_example_is_read_whole():
    rows, refused = read_rows(str(EXAMPLE))
    assert len(rows) + len(refused) == 339 and all(each.incomplete for each in refused)
    assert {row.fitted for row in rows} == {True, False}


def test_the_example_is_cut_by_model():
    rows, _ = read_rows(str(EXAMPLE))
    halves = {}
    for row in rows:
        assert halves.setdefault((row.system, row.model.name), row.fitted) == row.fitted


@pytest.fixture(scope="module")
def report():
    return json.loads(backtest(str(EXAMPLE), as_json=True), parse_constant=refuse)


def refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def test_predictions_of_the_example_keep_their_errors(report):
    """What `mpitrain plan backtest` prints. A change that makes them worse says so here."""
    dense = report["bars"]["dense bf16, all systems"]
    assert dense["calibrated"] < 0.055 and dense["gpu"] < 0.055 and dense["sustained"] < 0.055
    assert dense["calibrated"] < dense["flop rate"]
    assert report["bars"]["dense bf16, systems of 8 rows or more"]["calibrated"] < 0.045
    experts = report["bars"]["experts and fp8, all systems"]
    assert experts["gpu"] < 0.085 and experts["held back"] < 0.07 and experts["sustained"] < 0.095
    for name, never, of_gpu in (("A100", 0.05, 0.05), ("H100", 0.13, 0.095)):
        found = report["machines"][f"NVIDIA {name} SXM 80GB"]
        assert found["sustained"] < never and found["gpu"] < of_gpu
    assert 0.75 <= report["sustained_holds"]["share"] <= 0.85
    memory = next(each for each in report["memory"] if each["definition"] == "max allocated")
    assert memory["rows"] == 35 and memory["median"] < 0.04 and memory["p90"] < 0.07
    assert report["share_of_complete_rows_predicted"] >= 0.95
    assert report["interval_holds"]["share"] >= 0.7


def test_steps_that_nothing_was_chosen_with_are_predicted():
    unseen = json.loads(backtest(str(UNSEEN), as_json=True), parse_constant=refuse)
    experts = unseen["bars"]["experts and fp8, all systems"]
    assert experts["systems"] == 29 and experts["sustained"] < 0.135 and experts["calibrated"] < 0.06
    assert experts["held back"] < 0.1
    dense = unseen["bars"]["dense bf16, all systems"]
    assert dense["systems"] == 5 and dense["sustained"] < 0.14 and dense["calibrated"] < 0.045
    assert not unseen["refused"] and 0.75 <= unseen["sustained_holds"]["share"] <= 0.87
    rows = {row["id"] for row in csv.DictReader(EXAMPLE.read_text().splitlines())}
    assert rows.isdisjoint(row["id"] for row in csv.DictReader(UNSEEN.read_text().splitlines()))


def test_few_steps_leave_a_constant_near_its_beginning_and_many_move_it():
    twice = Sample(1.0, 2.0, regime="dense bf16")
    assert fit([], 0.3) == 0.3 and fit([Sample(1.0, 1.0)]) == 0
    one, many = (fit([twice] * number, regime="dense bf16") for number in (1, 200))
    assert 0.5 < one < many == pytest.approx(math.log(2), rel=0.01)


def test_a_step_that_is_far_off_counts_little():
    steps = [Sample(1.0, 1.1 + 0.01 * (number % 3), regime="dense bf16") for number in range(20)]
    wrong = Sample(1.0, 33.0, regime="dense bf16")
    assert fit([*steps, wrong], regime="dense bf16") == pytest.approx(
        fit(steps, regime="dense bf16"), abs=0.03
    )


def test_steps_of_another_regime_count_little():
    dense = [Sample(1.0, 1.1, regime="dense bf16")] * 5
    experts = [Sample(1.0, 3.0, regime="experts bf16")] * 5
    alone, both = (fit(steps, regime="dense bf16") for steps in (dense, dense + experts))
    assert alone < both < alone + 0.05 < fit(dense + experts)


def test_the_machine_of_a_csv_is_written_and_planned_with(tmp_path):
    """Steps that take 1.3 times as long as predicted: the file's figures predict them."""
    plain = dict(PLAIN, system="Megatron-LM PTD-P")
    models = ("GPT 7.5B", "GPT 18.4B", "GPT 22B")
    rows = [dict(plain, id=f"r{at}", model=model, iter_s=1.0) for at, model in enumerate(models)]
    predicted = [
        each["sustained_s"] / OF_SHEETS.middle
        for each in json.loads(backtest(written(tmp_path, *rows), as_json=True))["by_row"]
    ]
    path = written(tmp_path, *(dict(row, iter_s=1.3 * took) for row, took in zip(rows, predicted)))
    out = tmp_path / "mine.toml"
    backtest(path, out=str(out))
    machine = read_machine(str(out))
    assert "calibrated" in machine.name and machine.expected().low < 1.02 < machine.expected().high + 0.1
    again = json.loads(backtest(path, as_json=True, machine=str(out)))
    assert {each["system"].rpartition(" on ")[2] for each in again["by_row"]} != {machine.name}
    bare = written(
        tmp_path, *(dict(row, gpu_type="", iter_s=1.3 * took) for row, took in zip(rows, predicted))
    )
    named = json.loads(backtest(bare, as_json=True, machine=str(out)))["by_row"]
    for row in named:
        assert row["sustained_s"] / machine.expected().middle == pytest.approx(row["measured_s"], rel=0.08)
    several = written(tmp_path, *rows, dict(rows[0], id="x", gpu_type="H100"))
    with pytest.raises(ConfigError, match="needed rows of one system"):
        backtest(several, out=str(out))


def test_rows_are_written_as_a_csv(tmp_path):
    out = tmp_path / "found.csv"
    backtest(written(tmp_path, PLAIN, dict(PLAIN, id="y", iter_s="", mem_gb=20)), out=str(out))
    first, second = csv.DictReader(out.read_text().splitlines())
    assert first["id"] == "x" and float(first["measured_s"]) == 1.1 and float(first["gpu_s"]) > 0
    assert second["measured_s"] == "" and float(second["measured_bytes"]) == pytest.approx(
        20 * 2**30, rel=1e-5
    )


def test_options_of_the_back_test_are_typed(tmp_path):
    path, out = written(tmp_path, PLAIN, dict(PLAIN, id="own", gpu_type="")), tmp_path / "found.csv"
    words = ["plan", "backtest", path, "--machine", "a100-80gb", "--json", "--out", str(out)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert [each["id"] for each in json.loads(done.output)["by_row"]] == ["x", "own"]
    assert [row["id"] for row in csv.DictReader(out.read_text().splitlines())] == ["x", "own"]


def test_statistics():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))
    assert quantile([1, 2, 3, 4], 0.5) == 2.5 and math.isnan(quantile([], 0.5))


def test_a_sweep_says_what_the_first_choice_loses(tmp_path):
    rows = [
        dict(
            PLAIN, id=f"s{number}", model="GPT 7.5B", gbs_seqs=64, mbs=micro, tp=tp, pp=pp, iter_s=10 + number
        )
        for number, (tp, pp, micro) in enumerate(
            [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (8, 1, 2), (4, 2, 2), (2, 4, 2), (1, 8, 2)]
        )
    ]
    report = json.loads(backtest(written(tmp_path, *rows), as_json=True))
    (sweep,) = report["sweeps"]
    assert sweep["layouts"] == 8 and 0 <= sweep["loss"] < 0.5 and 0 < sweep["random_loss"] < 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["backtest"], "needed a CSV"),
        (["backtest", "missing.csv"], "give a CSV"),
        (["backtest", str(EXAMPLE), "--ranks", "2"], "--ranks does nothing"),
        (["backtest", str(EXAMPLE), "--out", "x.pdf"], "needed one of .svg .png .csv .toml"),
        (["--ranks", "4,x"], "--ranks 4,x: needed 1 to 16 numbers"),
        (["--ranks", "4,8", "--tokens", "1B"], "--tokens does nothing with several numbers of ranks"),
        (["--ranks", "4,8", "--top", "3"], "--top does nothing with several numbers of ranks"),
        (["--ranks", "4", "--what-if", "links.betwen=2x"], "did you mean links.between"),
        (["--ranks", "4", "--what-if", "links.between=fast"], "needed a factor"),
        (["--ranks", "4", "--price", "2"], "--price does nothing without --tokens"),
        (["a.toml", "b.csv"], "backtest before it"),
        ([], "--ranks is missing"),
        (["--ranks", "4", "--node-hours", "10"], "--node-hours does nothing without --tokens"),
        (["--ranks", "4", "--save-s", "10"], "--save-s does nothing without --tokens"),
        (["--ranks", "4", "--tokens", "many"], "needed a number of tokens"),
        (["--ranks", "4", "--machine", "cray-1"], "no such machine"),
    ],
)
def test_bad_input_is_one_message(words, message):
    done = CliRunner().invoke(cli, ["plan", *words])
    assert isinstance(done.exception, ConfigError) and message in str(done.exception)
    assert done.exception.exit_code == 2


def test_a_csv_of_something_else_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="needed system, model, gpu_type"):
        read_rows(str(path))


@pytest.mark.parametrize("number", [1, 3])
def test_all_rows_are_drawn(tmp_path, number):
    """One point each; a row without a time has none."""
    out = tmp_path / "rows.svg"
    rows = [dict(PLAIN, id=f"r{each}", iter_s=1 + each) for each in range(number)]
    backtest(written(tmp_path, *rows, dict(PLAIN, iter_s="", mem_gb=20)), out=str(out))
    _, points = re.split(r'<g id="PathCollection_1">', out.read_text())
    assert points.partition("</g>\n   </g>")[0].count("<use ") == number


EXTREMES = ("1", "3", "1e-9", "1e15", "65536", str(2**39), "7")


def test_extreme_numbers_are_predicted_or_refused(tmp_path):
    """Any number in any field: text and JSON come, and no figure is infinite or none."""
    chosen = random.Random(1)
    numbers = [name for name in FIELDS if name not in ("id", "system", "model", "gpu_type", "role", "note")]
    rows = []
    for model in ("GPT 22B", "Mixtral 8x7B", "DeepSeek V3"):
        for number in range(100):
            changed = {name: chosen.choice(EXTREMES) for name in chosen.sample(numbers, 3)}
            rows.append({**PLAIN, "id": f"{model} {number}", "model": model, **changed})
    path = written(tmp_path, *rows)
    report = json.loads(backtest(path, as_json=True), parse_constant=refuse)
    assert report["rows"] == 300 and report["predicted"] > 15 and len(report["refused"]) > 100
    assert "worst rows" in backtest(path)


def test_a_source_that_is_held_back_has_constants_of_others_alone(tmp_path):
    """Each takes twice as long as the one before; `gpu` has the other framework of the same paper, too."""
    rows = [
        dict(PLAIN, id=str(number), system=system, iter_s=2.0**number, source=f"{paper} Table {number}")
        for number, (system, paper) in enumerate(
            [("one", "P"), ("two", "P"), ("three", "Q@v1"), ("four", "Q")]
        )
    ]
    outcome = predict_rows(written(tmp_path, *rows))
    steps = [each.found.seconds for each in outcome.rows]
    middle = outcome.rows[0].row.machine.expected().middle
    for mode, others in (("gpu", (1, 2, 3)), ("held back", (2, 3))):
        factors = [math.log(2.0**other / steps[other]) for other in others]
        count = len(factors) / 4  # a framework of one row is a quarter of one
        trust = count / (count + 1)
        level = trust * quantile(factors, 0.5) + (1 - trust) * math.log(middle)
        assert outcome.rows[0].seconds[mode] == pytest.approx(steps[0] * math.exp(level))


def test_experts_with_a_fixed_number_of_rows_keep_no_host_waiting(tmp_path):
    """Megatron-Core drops tokens there (arXiv:2504.14960, table 3); MFU counts half of attention."""
    changes = dict(
        model="Mixtral 8x7B", recompute="none", tp=1, ep=8, mbs=1, gbs_seqs=32, iter_s="", mfu_pct=40,
        gpu_type="H100-80GB",
    )  # fmt: skip
    names = "MCore", "Megatron-Bridge"
    dropping, dropless = (read_one(tmp_path, system=name, **changes) for name in names)
    assert dropping.layout.awaits == 0 < 1 < dropless.layout.awaits
    by_rank = read_one(tmp_path, system=names[1], **changes, dispatcher="HybridEP")
    assert by_rank.layout.awaits == 1
    (works,) = {works_of(dropping.model, layout, 1.0).kinds[0][1] for layout in dropping.layouts}
    assert works.awaited == 0 < works_of(dropless.model, dropless.layout, 1.0).kinds[0][1].awaited
    assert dropping.measured.seconds == pytest.approx(dropless.measured.seconds)


@pytest.mark.parametrize(
    ("dispatcher", "dispatch", "hides"),
    [("", "alltoall", False), ("HybridEP", "hierarchical", False), ("alltoall+overlap", "alltoall", True)],
)
def test_a_row_says_how_rows_come_to_their_experts(tmp_path, dispatcher, dispatch, hides):
    layout = read_one(
        tmp_path, model="Mixtral 8x7B", ep=4, tp=1, mbs=1, gbs_seqs=8, dispatcher=dispatcher
    ).layout
    assert (layout.dispatch, layout.hides_dispatch) == (dispatch, hides)


def test_a_row_says_its_shards_and_what_cards_its_nodes_have(tmp_path):
    """8 ranks of a node share four cards of 100 Gbit/s, and reach as much of these as of their own ones."""
    plain, own = (
        read_one(tmp_path, tp=1, gpus=16, mbs=1, gbs_seqs=16, zero=1, dp_shard=shards, node_gbit=gbit)
        for shards, gbit in (("", ""), (8, 400))
    )
    assert (plain.layout.shards, own.layout.shards) == (16, 8)
    before, after = (row.machine.links.between for row in (plain, own))
    assert after.peak == 400e9 / 8 / 8
    assert after.sustained / after.peak == pytest.approx(before.sustained / before.peak)


def test_stages_of_published_steps_are_even(tmp_path):
    """22 blocks on 8 stages; where embedding and head count as blocks, 24."""
    layout = dict(pp=8, tp=1, mbs=1, gbs_seqs=8, model="GPT 1.5B")
    plain, ends = (
        read_one(tmp_path, system=name, **layout).layout.stages for name in ("Megatron-LM", "zero-bubble")
    )
    assert plain == (2, 3, 3, 3, 3, 3, 3, 2) and ends == (2, 3, 3, 3, 3, 3, 3, 2)
    deep = read_one(
        tmp_path, system="zero-bubble", **{**layout, "pp": 8, "vpp": 3, "schedule": "interleaved"}
    )
    assert deep.layout.stages == (0, *22 * (1,), 0)


def test_a_field_that_is_too_long_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match="field larger than field limit") as caught:
        read_rows(written(tmp_path, dict(PLAIN, note="x" * 200_000)))
    assert caught.value.exit_code == 2


def test_the_page_has_the_figures_that_the_back_test_finds(report):
    """And what mpitrain plan prints is the interval that the page speaks of."""
    page = " ".join((ROOT / "docs/guides/planning.md").read_text().split())
    plain, dense = report["sustained_holds"], report["bars"]["dense bf16, all systems"]
    assert f"{OF_SHEETS.low} to {OF_SHEETS.high} times" in page
    assert f"It holds {100 * plain['share']:.1f} % of the {plain['rows']} steps" in page
    held = report["interval_holds"]
    inside = round(held["share"] * held["rows"])
    assert f"hold {inside} of the {held['rows']} rows of that half ({100 * held['share']:.1f} %)" in page
    assert f"predicted {report['predicted']} of {report['rows']} rows, and gave bounds for" in page
    words = ("sheets", "sustained", "gpu", "held back", "calibrated", "flop rate", "sheet x factor")
    for name, line in zip(words, re.findall(r"\| [a-z][^|]* \| ([\d.]+) % \|", page), strict=True):
        assert line == f"{100 * dense[name]:.1f}", name
    experts = report["bars"]["experts and fp8, all systems"]["gpu"]
    assert f"Experts and fp8 are at {100 * experts:.1f} %" in page
    unknown = report["unknown_held"]
    within = round(unknown["share"] * unknown["rows"])
    assert f"bounds hold {within} of the {unknown['rows']} steps" in page
    memory = next(each for each in report["memory"] if each["definition"] == "max allocated")
    assert f"off by {100 * memory['median']:.1f} % in the median" in page
