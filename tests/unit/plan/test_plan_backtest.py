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
from mpitrain.commands.plan.fitted import Sample, fit, quantile, rank_correlation
from mpitrain.commands.plan.published_rows import read_rows
from mpitrain.errors import ConfigError

EXAMPLE = ROOT / "benchmarks/published_layouts.csv"
FIELDS = [
    "id", "system", "model", "layers", "hidden", "heads", "vocab", "params_b", "seq", "gbs_seqs", "mbs",
    "n_microbatches", "gpus", "gpu_type", "tp", "cp", "pp", "vpp", "dp", "ep", "zero", "recompute",
    "schedule",
    "ffn", "n_experts", "topk", "precision", "mfu_pct", "tflops_gpu", "tok_s_gpu", "iter_s", "mem_gb",
    "role", "note", "half",
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
    assert len(rows) + len(refused) == 138 and all(each.incomplete for each in refused)
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
    assert dense["calibrated"] < 0.06 and dense["gpu"] < 0.06
    assert dense["calibrated"] < dense["flop rate"]
    a100 = report["machines"]["NVIDIA A100 SXM 80GB"]
    assert a100["sustained"] < 0.08 and a100["gpu"] < 0.06
    memory = next(each for each in report["memory"] if each["definition"] == "max allocated")
    assert memory["rows"] == 35 and memory["median"] < 0.04 and memory["p90"] < 0.07
    assert report["share_of_complete_rows_predicted"] >= 0.95
    assert report["interval_holds"]["share"] >= 0.7


def test_a_fit_has_a_constant_for_four_rows_at_most():
    samples = [Sample(1.0, 0.5, 100, 1.2 + 0.3 * (number % 2)) for number in range(3)]
    assert fit(samples).number == 0
    assert fit(samples * 2).number == 1
    assert fit(samples * 3)._replace(compute=1.0).number <= 1


def test_a_fit_finds_a_slower_network():
    samples = [
        Sample(1.0, sent, 0, 1.1 * (1 + 2 * sent)) for sent in (0.1, 0.2, 0.4, 0.8, 0.3, 0.5, 0.05, 0.6)
    ]
    found = fit(samples)
    assert found.network == pytest.approx(2) and found.compute == pytest.approx(1.1)


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
        (["backtest", str(EXAMPLE), "--out", "x.pdf"], "needed one of .svg .png"),
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


def test_json_of_no_rows_is_valid(tmp_path):
    report = json.loads(backtest(written(tmp_path), as_json=True), parse_constant=refuse)
    assert report["rows"] == 0 and report["share_of_complete_rows_predicted"] is None


def test_a_field_that_is_too_long_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match="field larger than field limit") as caught:
        read_rows(written(tmp_path, dict(PLAIN, note="x" * 200_000)))
    assert caught.value.exit_code == 2


def test_the_page_has_the_figures_that_the_back_test_finds(report):
    """And what mpitrain plan prints is the interval that the page speaks of."""
    page = " ".join((ROOT / "docs/guides/planning.md").read_text().split())
    plain, dense = report["sustained_holds"], report["bars"]["dense bf16, all systems"]
    low, high = plain["interval"]
    assert f"{low} to {high} times" in page
    assert f"It holds {100 * plain['share']:.1f} % of the {plain['rows']} steps" in page
    held = report["interval_holds"]
    inside = round(held["share"] * held["rows"])
    assert f"hold {inside} of the {held['rows']} rows of that half ({100 * held['share']:.1f} %)" in page
    assert f"predicted {report['predicted']} of {report['rows']} rows, and gave bounds for" in page
    words = ("sheets", "sustained", "gpu", "calibrated", "flop rate", "sheet x factor")
    for name, line in zip(words, re.findall(r"\| [a-z][^|]* \| ([\d.]+) % \|", page), strict=True):
        assert line == f"{100 * dense[name]:.1f}", name
    experts = report["bars"]["experts and fp8, all systems"]["calibrated"]
    assert f"Experts and fp8 are at {100 * experts:.1f} %" in page
    unknown = report["unknown_held"]
    within = round(unknown["share"] * unknown["rows"])
    assert f"bounds hold {within} of the {unknown['rows']} steps" in page
    memory = next(each for each in report["memory"] if each["definition"] == "max allocated")
    assert f"off by {100 * memory['median']:.1f} % in the median" in page
