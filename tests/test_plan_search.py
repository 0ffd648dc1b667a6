"""`mpitrain plan`: what is chosen, why, what is refused; and each rule of the advice."""

import json

import pytest
from click.testing import CliRunner

from mpitrain.cli import cli
from mpitrain.commands.inspect import show_proof
from mpitrain.commands.plan.explained import goodput
from mpitrain.commands.plan.of_config import shape_of
from mpitrain.commands.plan.search import search
from mpitrain.config import load
from mpitrain.errors import ConfigError
from mpitrain.plan.declared.published import PUBLISHED, find_published
from mpitrain.plan.predict.step_time.advice import advice
from mpitrain.plan.predict.step_time.layout import StepLayout
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.step import predict_step

H100 = machine_of(find_machine("h100-80gb"))
SMALL = (
    "model.layers=4", "model.width=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128",
    "batch.global=16",
)  # fmt: skip


def planned(*words, code=0):
    done = CliRunner().invoke(cli, ["plan", *words], catch_exceptions=True)
    if code:
        return done.exception
    assert done.exit_code == 0, done.exception or done.output
    return done.output


def sets(*overrides):
    return [word for each in overrides for word in ("--set", each)]


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "mixtral-8x22b", "qwen3-30b-a3b", "deepseek-v3"])
def test_the_shape_of_a_configuration_is_that_of_the_registry(name):
    found = shape_of(load(None, (f"model.preset={name}",)))
    assert found._replace(source="") == PUBLISHED[name]._replace(source="")


def test_llama_405b_is_laid_out_as_it_was():
    """TP 8 and PP 16 on 16,384 GPUs at 8,192 tokens (arXiv:2407.21783, table 4)."""
    shape = find_published("llama3-405b")
    found = search(shape, StepLayout(16384, 8192, 2048), H100, {}, H100.memory_bytes)
    best = found.ranked[0].layout
    assert (best.tp, best.pp, best.dp, best.zero) == (8, 16, 128, 1)
    assert found.refused["fewer microbatches than stages"] and found.refused["memory"]


def test_a_small_model_needs_nothing_but_dp():
    found = search(find_published("llama3.2-1b"), StepLayout(8, 4096, 64), H100, {}, 0.9 * H100.memory_bytes)
    best = found.ranked[0].layout
    assert (best.tp, best.pp, best.cp, best.dp, best.zero) == (1, 1, 1, 8, 1)


def test_what_is_fixed_stays():
    shape = find_published("llama3-8b")
    found = search(shape, StepLayout(16, 4096, 64), H100, {"tp": 2, "pp": 4}, H100.memory_bytes)
    assert {(each.layout.tp, each.layout.pp) for each in found.ranked} == {(2, 4)}


def test_less_memory_is_kept():
    shape = find_published("llama3-8b")
    for limit in (30e9, 50e9, 80e9):
        found = search(shape, StepLayout(16, 8192, 64), H100, {}, limit)
        assert found.ranked and all(each.found.footprint.total < 1.15 * limit for each in found.ranked)


def test_what_is_written_is_proved_and_asked_no_more(tmp_path):
    out = tmp_path / "best.toml"
    text = planned("--ranks", "8", "--out", str(out), *sets(*SMALL))
    assert f"mpirun -n 8 mpitrain run {out}" in text
    assert "proved:" in show_proof(str(out), (), 8)


def test_json_says_all_of_it():
    tree = json.loads(planned("--ranks", "4", "--json", "--tokens", "1B", *sets(*SMALL)))
    best = tree["best"][0]
    assert best["layout"]["ranks"] == 4 and best["interval_s"][0] <= best["seconds"] < best["interval_s"][1]
    assert sum(best["parts_s"].values()) == pytest.approx(best["seconds"], rel=0.05)
    assert tree["training"]["steps"] == -(-(10**9) // (16 * 128))


def test_the_balance_is_explained():
    words = sets("model.preset=llama3-8b", "data.sequence=8192", "parallel.tp=8", "precision.compute=bf16")
    text = planned("--ranks", "8", "--machine", "h100-80gb", "--explain", *words)
    assert "arithmetic intensity" in text and "tp 8 (inside a node)" in text and "GB/s" in text


def test_what_cannot_fit_says_what_binds():
    error = planned("--ranks", "2", "--memory", "0.001", *sets(*SMALL), code=2)
    assert isinstance(error, ConfigError) and "memory" in str(error) and "--memory" in str(error)


def test_what_is_fixed_and_cannot_be_is_named():
    error = planned("--ranks", "6", *sets(*SMALL, "parallel.tp=4"), code=2)
    assert isinstance(error, ConfigError) and "tp = 4" in str(error)


def test_failures_cost_little_if_saves_are_often():
    shape = find_published("llama3-405b")
    layout = StepLayout(16384, 8192, 2048, tp=8, pp=16)
    found = goodput(shape, layout, H100, 6.0, 15e12, 6334)
    assert 0.8 < found.share < 1 and found.save_every_s > 10 * found.save_s
    assert goodput(shape, layout, H100, 6.0, 15e12, 600).share < found.share


BROKEN = [
    ("beyond a node of 8 ranks", "gpt-39.1b", dict(ranks=64, batch=64, tp=16, pp=2)),
    ("products are too thin", "llama3.2-1b", dict(ranks=8, batch=64, tp=8)),
    ("waits for experts' rows", "qwen3-30b-a3b", dict(ranks=64, batch=64, ep=64)),
    ("shards are gathered", "llama3-8b", dict(ranks=64, batch=64, zero=3, sharded=16)),
    ("the bubble is", "gpt-39.1b", dict(ranks=64, batch=8, tp=8, pp=8)),
    ("zero = 1 sends no more", "gpt-7.5b", dict(ranks=64, batch=64, zero=0, tp=4)),
    ("fits without", "llama3.2-1b", dict(ranks=8, batch=64, zero=3)),
    ("nearly full", "llama3-8b", dict(ranks=8, batch=8)),
]
KEPT = [
    ("beyond a node of 8 ranks", "gpt-39.1b", dict(ranks=64, batch=64, tp=8, pp=2)),
    ("products are too thin", "llama3-70b", dict(ranks=8, batch=64, tp=8)),
    ("waits for experts' rows", "qwen3-30b-a3b", dict(ranks=64, batch=64, ep=8)),
    ("shards are gathered", "llama3-8b", dict(ranks=64, batch=64, zero=3, sharded=8)),
    ("the bubble is", "gpt-39.1b", dict(ranks=64, batch=256, tp=8, pp=8)),
    ("zero = 1 sends no more", "gpt-7.5b", dict(ranks=64, batch=64, zero=1, tp=4)),
    ("fits without", "llama3-70b", dict(ranks=64, batch=64, zero=3)),
    ("nearly full", "llama3-8b", dict(ranks=64, batch=64, zero=3)),
]


def advised(model, keys):
    shape, layout = find_published(model), StepLayout(sequence=4096, **keys)
    return advice(shape, layout, H100, predict_step(shape, layout, H100))


@pytest.mark.parametrize(("rule", "model", "keys"), BROKEN)
def test_a_broken_rule_is_said_in_one_line(rule, model, keys):
    (line,) = [each for each in advised(model, keys) if rule in each]
    assert "\n" not in line and any(letter.isdigit() for letter in line)


@pytest.mark.parametrize(("rule", "model", "keys"), KEPT)
def test_a_rule_that_is_kept_is_not_mentioned(rule, model, keys):
    assert not [each for each in advised(model, keys) if rule in each]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_no_advice_for_the_quickstart(ranks):
    assert json.loads(planned("--ranks", str(ranks), "--json"))["advice"] == []


@pytest.mark.parametrize(
    ("overrides", "ranks", "rule"),
    [
        (("parallel.tp=4", "comm.node_ranks=2"), 4, "beyond a node of 2 ranks"),
        (("parallel.pp=4", "batch.global=8"), 8, "4 microbatches for 4 stages"),
        (("parallel.zero=0",), 4, "parallel.zero = 0"),
        (("parallel.zero=3",), 4, "fits without"),
    ],
)
def test_check_gives_advice(overrides, ranks, rule):
    assert rule in show_proof(None, overrides, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_check_of_the_quickstart_gives_none(ranks):
    assert "advice" not in show_proof(None, (), ranks)


def test_check_says_nothing_of_a_memory_that_it_does_not_know():
    overrides = ("model.preset=llama3-8b", "parallel.tp=8", "data.sequence=8192", "batch.global=8")
    assert "nearly full" not in show_proof(None, overrides, 8)
