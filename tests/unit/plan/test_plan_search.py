"""`mpitrain plan`: what is chosen, why, what is refused; and each rule of the advice."""

import json
import math
import re
from contextlib import suppress
from itertools import islice

import pytest
from click.testing import CliRunner
from conftest import LONG, but_for
from public_models import public_model, public_space

from mpitrain.cli import cli
from mpitrain.commands.inspect import show_proof
from mpitrain.config import flatten, load, with_values
from mpitrain.errors import ConfigError, InputError, ScheduleError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.formatting import finite
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.step_time import advice as advice_module
from mpitrain.plan.predict.step_time.advice import advice
from mpitrain.plan.predict.step_time.footprint import footprint_of
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step import predict_step
from mpitrain.plan.predict.step_time.step_model import step_model, works_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.plan.settings.rule_table import can_regather
from mpitrain.planner.candidates import candidates
from mpitrain.planner.choice import Preference
from mpitrain.planner.explained import why_lost
from mpitrain.planner.goodput import goodput, save_times
from mpitrain.planner.search import search
from mpitrain.schedules import catalog

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


def test_llama_405b_is_laid_out_as_it_was():
    """TP 8 and PP 16 on 16,384 GPUs at 8,192 tokens (arXiv:2407.21783, table 4)."""
    found = search(*public_space("llama3-405b", H100, 16384, 8192, 2048), H100.memory_bytes)
    best = next(found.ranked).layout
    assert (best.tp, best.pp, best.dp, best.zero) == (8, 16, 128, 1)
    assert found.refused["fewer microbatches than stages"] and found.refused["memory"]


@pytest.mark.parametrize(
    ("reproducible", "zero", "each"), [("run", 3, True), ("layout", 3, False), ("run", 1, False)]
)
def test_a_plan_sums_gradients_as_often_as_a_run(reproducible, zero, each):
    """A tree sums over microbatches first."""
    keys = ("batch.global=8", f"parallel.zero={zero}", f"numerics.reproducible={reproducible}")
    run = resolve(load(None, keys), 8, 256)
    assert (run.parallel.reduce == "microbatch") == layout_of(run, H100).sums_each == each


@pytest.mark.parametrize("reduce", ["same", "bf16"])
@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_that_travel_in_16_bits_are_kept_as_they_are(reduce, zero):
    """As a run's own prediction has it."""
    keys = ("model.preset=llama3-8b", "parallel.dp=2", f"parallel.zero={zero}", "precision.compute=bf16")
    run = resolve(load(None, (*keys, "batch.global=8", f"precision.reduce={reduce}")), 2, 128256)
    plan = plan_of(run)
    found = footprint_of(step_model(plan), layout_of(run, H100), (1,))
    assert found.gradients == pytest.approx(predict(plan)[0].gradients, rel=0.01)


def test_a_small_model_needs_nothing_but_dp():
    found = search(*public_space("llama3.2-1b", H100, 8, 4096, 64), 0.9 * H100.memory_bytes)
    best = next(found.ranked)
    of_it = best.layout
    assert (of_it.tp, of_it.pp, of_it.cp, of_it.dp, of_it.zero) == (1, 1, 1, 8, 1)
    assert why_lost(best, best, "it is the same") == "as fast, but it is the same"


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (Preference(True, 0, 1), "its memory is nearly full"),
        (Preference(False, 2, 1), "more of its axes are between nodes"),
        (Preference(False, 1, 3), "it adds axes or options"),
    ],
)
def test_what_a_faster_layout_is_left_behind_for_is_said(one, words):
    preferred = Preference(False, 1, 2)
    assert one > preferred and one.drawback(preferred) == words


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "fixed",
    [
        {"parallel.tp": 2, "parallel.pp": 4},
        {"pipeline.chunks": 2},
        {"pipeline.chunks": 4, "parallel.pp": 2},
        {"parallel.dp_shard": 8},
        {"parallel.zero": 2},
        {"pipeline.schedule": "zbv"},
    ],
    ids=str,
)
def test_what_is_fixed_stays(fixed):
    model, space = public_space("llama3-8b", H100, 16, 4096, 64, fixed)
    found = [*islice(search(model, space, H100.memory_bytes).ranked, 12)]
    assert found
    for each in found:
        for config in (each.config, space.resolved(each.config)):
            assert {key: flatten(config)[key] for key in fixed} == fixed or each.layout.dp == 1


def test_a_candidate_says_all_of_its_layout():
    """Only how rows travel, and what nobody chose, is left to what a run settles."""
    model, space = public_space("mixtral-8x7b", H100, 16, 4096, 64)
    for candidate in candidates(space, model):
        with suppress(InputError):
            resolved = flatten(space.resolved(candidate))
            written = flatten(candidate)
            for key in ("tp", "cp", "pp", "dp", "ep", "etp", "dp_shard", "context", "regather"):
                assert resolved[f"parallel.{key}"] == written[f"parallel.{key}"]
            assert resolved["batch.micro"] == written["batch.micro"]
            leaner = can_regather(space.resolved(candidate))
            assert leaner == (written["parallel.tp"] > 1 and written["memory.recompute"] != "full")
            again = with_values(candidate, {"parallel.regather": leaner})
            assert space.resolved(again).parallel.regather == leaner


def test_ulysses_is_chosen_on_slow_links_and_never_beyond_key_value_heads():
    slow = H100._replace(inside=8e9, between=0.7e9)
    for cp, is_possible in ((8, True), (16, False)):
        fixed = {"parallel.cp": cp, "parallel.tp": 1, "parallel.pp": 1}
        found = search(*public_space("llama3-8b", slow, 16, 16384, 32, fixed), 4 * H100.memory_bytes)
        kinds = [each.layout.context for each in islice(found.ranked, 12)]
        assert (kinds[0] == "ulysses") == ("ulysses" in kinds) == is_possible
    fixed = {"parallel.cp": 2, "parallel.tp": 1}
    found = search(*public_space("llama3-8b", H100, 16, 16384, 32, fixed), H100.memory_bytes)
    assert next(found.ranked).layout.context == "zigzag"  # hidden beneath attention, no all-to-all is


def test_a_kind_sends_what_a_layer_of_it_declares():
    """Of one block, a sequence of T positions on each of c ranks, as plan/declared/traffic.py has it."""
    shape = public_model("llama3-8b")
    c, T, w = 4, 8192, 2
    row = 128 * T // c * w
    expected = {"ulysses": (32 + 2 * 8) * row + 32 * row, "gather": 2 * 8 * row * c}
    for kind, num_bytes in expected.items():
        work, _ = works_of(shape, StepLayout(c, T, 4, cp=c, context=kind), 1.0).kinds[0]
        assert sum(each.num_bytes for each in work.forward if each.axis == "cp") == num_bytes
        assert sum(each.num_bytes for each in work.backward if each.axis == "cp") == num_bytes


def test_weights_are_kept_over_the_step_where_they_fit_and_gain():
    fixed = {
        "parallel.zero": 3, "parallel.pp": 1, "parallel.tp": 1, "batch.micro": 1, "memory.recompute": "none"
    }  # fmt: skip
    shape, space = public_space("llama3-8b", H100, 64, 8192, 512, fixed)
    roomy = next(search(shape, space, 80e9).ranked)
    tight = next(search(shape, space, 50e9).ranked)
    assert (roomy.layout.gather, tight.layout.gather) == ("step", "auto")
    assert roomy.found.seconds < tight.found.seconds
    assert roomy.found.footprint.weights == pytest.approx(2 * shape.num_parameters, rel=1e-4)
    assert tight.found.footprint.weights < 2 * shape.num_parameters / 32
    once = search(*public_space("llama3-8b", H100, 64, 8192, 64, fixed), 80e9)  # one microbatch
    assert {each.layout.gather for each in once.ranked} == {"auto"}


def test_the_optimizer_is_offloaded_only_where_nothing_as_fast_fits(tmp_path):
    out = tmp_path / "best.toml"
    words = ("--machine", "h100-80gb", *sets("model.preset=llama3-8b", "data.sequence=2048", "batch.global=8",
             "precision.compute=bf16"))  # fmt: skip
    text = planned("--ranks", "1", "--out", str(out), *words)
    assert text.splitlines()[1].startswith('nothing as fast fits without memory.offload = "optimizer"')
    assert load(str(out), ()).memory.offload == "optimizer" and "proved:" in show_proof(str(out), (), 1)
    held = json.loads(planned("--ranks", "1", "--json", *words))["best"][0]["held_bytes"]
    assert 8e9 * 12 > H100.memory_bytes > held  # its moments alone are more than a rank has
    refused = planned("--ranks", "1", *words, *sets("memory.offload=none"), code=2)
    assert "no layout" in refused.args[0] or "memory" in refused.args[0]
    assert "offload" not in planned("--ranks", "8", *words)


@pytest.mark.parametrize("offload", ["activations", "optimizer", "all"])
def test_what_is_offloaded_by_hand_is_in_the_times_of_a_measured_host_and_else_said_not_to_be(offload):
    words = sets("model.preset=llama3.2-1b", "precision.compute=bf16", f"memory.offload={offload}")
    said = planned("--ranks", "1", "--machine", "h100-80gb", *words)
    assert f'memory.offload = "{offload}": what its copies to the host and back' in said
    said = planned("--ranks", "1", "--machine", "h100-measured", *words)
    assert "is a guess" not in said and f"offload {offload}" in said


def test_less_memory_is_kept():
    for limit in (30e9, 50e9, 80e9):
        ranked = search(*public_space("llama3-8b", H100, 16, 8192, 64), limit).ranked
        assert all(each.found.footprint.total < 1.4 * limit for each in [next(ranked), *islice(ranked, 6)])


LLAMA_405B = (
    *("model.preset=llama3.1-405b", "parallel.tp=8", "parallel.pp=16", "parallel.dp=128"),
    *("data.sequence=8192", "batch.global=2048", "precision.compute=bf16", "run.device=cuda"),
)


def test_inputs_are_gathered_again_where_memory_asks_for_it(tmp_path):
    """Kept whole, they need full recomputation. Where all fits, or the key is set, nothing is tried."""
    words = "--ranks", "16384", "--machine", "h100-80gb", "--top", "1", *sets(*LLAMA_405B)
    found = json.loads(planned(*words, "--json", "--out", str(tmp_path / "best.toml")))["best"][0]
    written = flatten(load(str(tmp_path / "best.toml"), ()))
    assert (written["parallel.regather"], written["memory.recompute"]) == (True, "selective")
    assert found["held_bytes"] < found["memory_limit_bytes"]
    kept = planned(*words, *sets("parallel.regather=false"))
    assert "recompute full" in kept and " regather" not in kept
    assert "regather" not in planned("--ranks", "8", *sets(*SMALL, "parallel.tp=2"))
    assert "regather" in planned("--ranks", "8", *sets(*SMALL, "parallel.tp=2", "parallel.regather=true"))


@pytest.mark.parametrize("machine", ["h100-80gb", "laptop"])
def test_a_gather_travels_under_products_of_a_gpu_alone(machine):
    """Within a node it costs a GPU nothing. On a CPU a step waits for all of it: a quarter more of tp."""
    rates = machine_of(find_machine(machine))._replace(ranks_per_node=8)
    layout = StepLayout(8, 8192, 8, tp=4)
    waits = [
        predict_step(public_model("llama3-8b"), layout._replace(regathers=value), rates).exposed["tp"]
        for value in (False, True)
    ]
    assert waits[1] == waits[0] if rates.on_gpu else waits[0] < waits[1] < 1.3 * waits[0]


def test_what_is_written_is_proved_and_asked_no_more(tmp_path):
    out = tmp_path / "best.toml"
    text = planned("--ranks", "8", "--out", str(out), *sets(*SMALL))
    assert f"mpirun -n 8 mpitrain run {out}" in text
    assert "proved:" in show_proof(str(out), (), 8)


def test_json_says_all_of_it():
    tree = json.loads(planned("--ranks", "4", "--json", "--tokens", "1B", *sets(*SMALL)))
    best = tree["best"][0]
    assert best["layout"]["ranks"] == 4
    low, high = best["interval_s"]
    assert low < best["seconds"] < high
    assert best["mfu_interval"][0] < best["mfu"] < best["mfu_interval"][1]
    assert sum(best["parts_s"].values()) == pytest.approx(best["seconds"])
    assert tree["training"]["steps"] == -(-(10**9) // (16 * 128))


def test_the_balance_is_explained():
    words = sets("model.preset=llama3-8b", "data.sequence=8192", "parallel.tp=8", "precision.compute=bf16")
    text = planned("--ranks", "8", "--machine", "h100-80gb", "--explain", *words)
    assert "arithmetic intensity" in text and "tp 8 (inside a node)" in text and "GB/s" in text


def test_what_cannot_fit_says_what_binds():
    error = planned("--ranks", "2", "--memory", "0.001", *sets(*SMALL), code=2)
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert "no rank may hold more than 0.001 GB as a process" in str(error)
    assert re.search(r"is left: memory \d+", str(error))


def test_what_is_fixed_and_cannot_be_is_named():
    error = planned("--ranks", "6", *sets(*SMALL, "parallel.tp=4"), code=2)
    assert isinstance(error, ConfigError)
    assert "no layout divides these ranks and the model: tp 4 of 6 ranks; fixed: parallel.tp = 4;" in str(
        error
    )


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("machine", "overrides", "more"),
    [
        ("laptop", {"parallel.dp_shard": 2}, {}),
        ("laptop", {"parallel.dp_shard": 2, "parallel.zero": 3}, {}),
        ("laptop", {"pipeline.chunks": 3}, {"pipeline.schedule": "interleaved"}),
        ("laptop", {"pipeline.chunks": 2, "parallel.pp": 1}, {}),
        ("laptop", {"pipeline.schedule": "zbv", "parallel.pp": 1}, {}),
        ("laptop", {"pipeline.schedule": "seq1f1b", "pipeline.segments": 2, "parallel.pp": 4}, {}),
        ("laptop", {"memory.recompute": "every-k", "memory.every": 2}, {}),
        ("laptop", {"parallel.zero": 0}, {}),
        ("laptop", {"parallel.zero": 3, "parallel.reduce": "step"}, {}),
        ("laptop", {"precision.reduce": "bf16"}, {}),
        ("h100-80gb", {"precision.compute": "fp32"}, {}),
        ("h100-80gb", {"precision.compute": "fp8"}, {}),
    ],
    ids=str,
)
def test_a_key_that_was_set_is_written_as_it_was(tmp_path, machine, overrides, more):
    out = tmp_path / "best.toml"
    words = (f"{key}={value}" for key, value in overrides.items())
    planned("--ranks", "4", "--machine", machine, "--out", str(out), *sets(*SMALL, *words))
    written = flatten(load(str(out)))
    assert {key: written[key] for key in (*overrides, *more)} == {**overrides, **more}
    assert "proved:" in show_proof(str(out), (), 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.ep=2",), 'parallel.ep = 2: model.family = "llama" has no experts'),
        (("parallel.etp=2",), 'parallel.etp = 2: model.family = "llama" has no experts'),
        (("parallel.dp_shard=3",), "fixed: parallel.dp_shard = 3;"),
        (("parallel.dp_shard=2", "parallel.zero=0"), "with parallel.zero = 0 divides nothing"),
        (
            ("pipeline.schedule=dualpipe", "batch.global=4", "parallel.pp=4"),
            "a schedule that isn't defined for so many stages and microbatches 3",
        ),
    ],
    ids=str,
)
def test_a_key_that_cannot_be_kept_is_refused(overrides, message):
    error = planned("--ranks", "4", *sets(*SMALL, *overrides), code=2)
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert message in str(error) and "\n" not in str(error)


def test_recomputing_groups_of_blocks_takes_the_time_of_a_forward():
    seconds = {}
    for mode in ("none", "full", "every-k"):
        words = sets(*SMALL, f"memory.recompute={mode}", "batch.micro=4", "parallel.dp=4")
        tree = json.loads(planned("--ranks", "4", "--json", *words))
        seconds[mode] = tree["best"][0]["seconds"]
        assert any("every-k" in note for note in tree["notes"]) == (mode == "every-k")
    assert seconds["every-k"] == seconds["full"] > 1.2 * seconds["none"]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("dispatch", "ranks", "found"),
    [
        ("auto", 8, "alltoall"),
        ("auto", 16, "hierarchical"),
        ("hierarchical", 16, "hierarchical"),
        pytest.param("flat", 16, "alltoall", marks=LONG),
    ],
)
def test_experts_rows_go_to_nodes_first_where_they_can(dispatch, ranks, found):
    keys = ("model.preset=qwen3-30b-a3b", "data.sequence=4096", f"parallel.ep={ranks}", "batch.global=64")
    tree = json.loads(
        planned(
            "--ranks", str(ranks), "--machine", "h100-80gb", "--memory", "1e4", "--json",
            *sets(*keys, f"experts.dispatch={dispatch}", "precision.compute=bf16"),
        )
    )  # fmt: skip
    assert {each["layout"]["dispatch"] for each in tree["best"]} == {found}


@pytest.mark.parametrize(("width", "degrees"), [(64, {1, 2}), (63, {1})])
def test_experts_are_whole_or_divided_as_the_dense_layers_are(width, degrees):
    changed = dict(layers=4, experts=dict(width=width))

    def tried(**fixed):
        keys = {f"parallel.{axis}": degree for axis, degree in fixed.items()}
        model, space = public_space("mixtral-8x7b", H100, 8, 256, 64, keys, **changed)
        return [config.parallel for config in candidates(space, model)]

    assert all(8 % (each.ep * each.etp) == 0 for each in tried(tp=2, pp=1))
    assert {each.etp for each in tried(tp=2, pp=1)} == degrees
    assert {each.etp for each in tried(tp=1)} == {1}


def test_json_holds_no_number_that_is_none():
    """What would be a number without an end is null."""
    assert finite({"a": math.inf, "b": [math.nan, 1.5]}) == {"a": None, "b": [None, 1.5]}


def test_failures_cost_little_if_saves_are_often():
    shape = public_model("llama3-405b")
    layout = StepLayout(16384, 8192, 2048, tp=8, pp=16)
    save = save_times(shape, layout, H100, blocking=True)
    found = goodput(layout, H100, 6.0, 15e12, 6334, save)
    assert 0.8 < found.share < 1 and found.save_every_s > 10 * found.save_s
    assert goodput(layout, H100, 6.0, 15e12, 600, save).share < found.share


def test_a_node_that_is_partly_used_fails_as_a_whole_one():
    shape = public_model("llama3-8b")

    def on(ranks, batch=60):
        layout = StepLayout(ranks, 8192, batch)
        return goodput(layout, H100, 6.0, 1e12, 6334, save_times(shape, layout, H100, blocking=True))

    two, three = map(on, (12, 20))
    assert three.save_s == pytest.approx(two.save_s * 2 / 3)
    whole = on(16, 64)
    assert two.save_s == whole.save_s and two.save_every_s == whole.save_every_s


BROKEN = [
    ("beyond a node of 8 ranks", "gpt-39.1b", dict(ranks=64, batch=64, tp=16, pp=2)),
    ("its matrix products are too small", "llama3.2-1b", dict(ranks=8, batch=64, tp=8)),
    ("waits for experts' rows", "qwen3-30b-a3b", dict(ranks=64, batch=64, ep=64)),
    ("divides each expert", "mixtral-8x7b", dict(ranks=8, batch=64, tp=2, ep=4, etp=2)),
    ("keys and values", "llama3-8b", dict(ranks=16, batch=16, sequence=8192, cp=16)),
    ("without recomputation", "llama3-8b", dict(ranks=8, batch=8, sequence=32768)),
    ("the bubble is", "gpt-39.1b", dict(ranks=64, batch=8, tp=8, pp=8)),
    ("zero = 1 sends no more", "gpt-7.5b", dict(ranks=64, batch=64, zero=0, tp=4)),
    ("fits without", "llama3.2-1b", dict(ranks=8, batch=64, zero=3)),
    ("nearly full", "llama3-8b", dict(ranks=8, batch=8)),
]
KEPT = [
    ("beyond a node of 8 ranks", "gpt-39.1b", dict(ranks=64, batch=64, tp=8, pp=2)),
    ("its matrix products are too small", "llama3-70b", dict(ranks=8, batch=64, tp=8)),
    ("waits for experts' rows", "qwen3-30b-a3b", dict(ranks=64, batch=64, ep=8)),
    ("shards are gathered", "llama3-8b", dict(ranks=64, batch=64, zero=3, sharded=8)),
    ("divides each expert", "mixtral-8x7b", dict(ranks=8, batch=64, tp=2, ep=8)),
    ("keys and values", "llama3-8b", dict(ranks=16, batch=16, sequence=8192, cp=8)),
    ("without recomputation", "llama3-8b", dict(ranks=8, batch=8, sequence=32768, recompute="full")),
    ("without recomputation", "llama3-8b", dict(ranks=8, batch=8, sequence=4096)),
    ("the bubble is", "gpt-39.1b", dict(ranks=64, batch=256, tp=8, pp=8)),
    ("zero = 1 sends no more", "gpt-7.5b", dict(ranks=64, batch=64, zero=1, tp=4)),
    ("fits without", "llama3-70b", dict(ranks=64, batch=64, zero=3)),
    ("nearly full", "llama3-8b", dict(ranks=64, batch=64, zero=3)),
]


def advised(model, keys, searched=()):
    shape, layout = public_model(model), StepLayout(**{"sequence": 4096, **keys})
    return advice(shape, layout, H100, predict_step(shape, layout, H100), searched=searched)


@pytest.mark.parametrize(("rule", "model", "keys"), BROKEN)
def test_a_broken_rule_is_said_in_one_line(rule, model, keys):
    (line,) = [each for each in advised(model, keys) if rule in each]
    assert "\n" not in line and any(letter.isdigit() for letter in line)


@pytest.mark.parametrize(("rule", "model", "keys"), KEPT)
def test_a_rule_that_is_kept_is_not_mentioned(rule, model, keys):
    assert not [each for each in advised(model, keys) if rule in each]


@pytest.mark.parametrize(("number", "axis"), list(enumerate(["tp", "tp", "ep", "etp", "cp"])))
def test_no_degree_is_advised_against_that_a_plan_has_chosen(number, axis):
    """One of deepseek-v3 on 1,024 H200 said: use ep x etp <= 8, with which it is a fifth slower."""
    rule, model, keys = BROKEN[number]
    assert not [line for line in advised(model, keys, searched=(axis,)) if rule in line]


def test_no_degree_of_a_planned_layout_is_advised_against():
    """The planner has seen ep = 8 there, which doesn't fit."""
    keys = (
        "model.preset=deepseek-v3", "model.layers=8", "model.mtp=0", "run.machine=h100-80gb",
        "data.sequence=4096", "precision.compute=bf16", "run.layout=planned", "batch.global=512",
        "parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "parallel.zero=1", "batch.micro=1",
    )  # fmt: skip
    said = show_proof(None, keys, 128)
    assert "the layout is planned, dp 128 ep 32" in said and "advice" not in said


def test_another_schedule_is_advised_where_a_plan_had_no_choice():
    keys = dict(ranks=64, batch=16, tp=8, pp=8)
    (line,) = [each for each in advised("gpt-39.1b", keys) if "the bubble is" in each]
    (chosen,) = [each for each in advised("gpt-39.1b", keys, searched=("pp",)) if "the bubble is" in each]
    assert line.startswith(chosen) and line.removeprefix(chosen).startswith(", or use pipeline.schedule")


SHARDED = dict(ranks=64, batch=64, sequence=4096, zero=3)


@pytest.mark.parametrize(("between", "said"), [(H100.between, False), (1e9, True)])
def test_a_rule_is_said_only_where_the_step_that_keeps_it_is_faster(between, said):
    """Shards over nodes: as fast as a node's own cards carry them, the larger group sends less."""
    machine = H100._replace(between=between)
    shape = public_model("llama3-8b")
    mine, kept = (StepLayout(sharded=sharded, **SHARDED) for sharded in (16, 8))
    before, after = (predict_step(shape, layout, machine).seconds for layout in (mine, kept))
    lines = [
        line
        for line in advice(shape, mine, machine, predict_step(shape, mine, machine))
        if "shards are gathered" in line
    ]
    assert (after < before) is said and bool(lines) is said
    if said:
        middle = machine.spread.middle  # of what such steps take, as `mpitrain plan` prints them
        words = f"{middle * after:.3g} s a step instead of {middle * before:.3g}"
        assert f"dp_shard = 8 takes {words}" in lines[0]


@pytest.mark.parametrize(("rule", "model", "keys"), [each for each in BROKEN if each[0] != "nearly full"])
def test_numbers_of_advice_are_those_of_the_planner(rule, model, keys):
    """Before: the layout's own step. After: that of some layout, which is one that a plan would predict."""
    shape, layout = public_model(model), StepLayout(**{"sequence": 4096, **keys})
    before = predict_step(shape, layout, H100)
    (line,) = [each for each in advised(model, keys) if rule in each]
    if "s a step instead of" in line:
        assert f"s a step instead of {H100.spread.middle * before.seconds:.3g}" in line
    else:
        assert f"{100 * before.bubble / before.seconds:.0f} % of a step" in line


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_no_advice_for_the_quickstart(ranks):
    assert json.loads(planned("--ranks", str(ranks), "--json"))["advice"] == []


@pytest.mark.parametrize(
    ("overrides", "ranks", "rule"),
    [
        (("parallel.tp=4", "comm.node_ranks=2"), 4, "beyond a node of 2 ranks"),
        (("parallel.pp=4", "batch.global=8"), 8, "4 microbatches for 4 stages"),
        (("parallel.zero=0",), 4, "parallel.zero = 0"),
    ],
)
def test_check_gives_advice(overrides, ranks, rule):
    assert rule in show_proof(None, overrides, ranks)


EXPERTS_OVER_NODES = (
    "parallel.ep=64", "parallel.pp=4", "comm.node_ranks=8", "run.device=cuda", "data.sequence=4096",
    "batch.global=2048", "precision.compute=bf16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "dispatch", "changes"),
    [
        ("deepseek-v3", "auto", "use ep x etp <= 8"),
        ("deepseek-v3", "flat", 'use ep x etp <= 8, or experts.dispatch = "hierarchical"'),
        ("qwen3-235b-a22b", "auto", "use ep x etp <= 8, or experts.groups, so that"),
    ],
)
def test_experts_over_nodes_are_advised_what_they_do_not_have(preset, dispatch, changes):
    keys = (*EXPERTS_OVER_NODES, f"model.preset={preset}", f"experts.dispatch={dispatch}")
    found = [line for line in show_proof(None, keys, 256).splitlines() if "beyond a node" in line]
    assert len(found) == 1 and f"experts' rows; {changes}" in found[0]
    assert found[0].count("experts.") == changes.count("experts.")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_check_of_the_quickstart_gives_none(ranks):
    assert "advice" not in show_proof(None, (), ranks)


def test_check_says_nothing_of_a_memory_that_it_does_not_know():
    overrides = ("model.preset=llama3-8b", "parallel.tp=8", "data.sequence=8192", "batch.global=8")
    assert "nearly full" not in show_proof(None, overrides, 8)
    assert "fits without" not in show_proof(None, ("parallel.zero=3",), 4)
    assert "fits without" in planned("--ranks", "4", *sets(*SMALL, "parallel.zero=3"))


FEW_SCHEDULES = ("1f1b", "interleaved", "v-half", "zbv-auto", "dualpipev", "seq1f1b")


@pytest.mark.few_cases(5)
@pytest.mark.parametrize(
    "name", but_for(catalog.NAMES, longer=[name for name in catalog.NAMES if name not in FEW_SCHEDULES])
)
def test_check_and_plan_have_every_schedule(name):
    keys = (*SMALL, "model.layers=8", f"pipeline.schedule={name}", "parallel.pp=4")
    assert "proved:" in show_proof(None, keys, 4)
    assert f"pp 4 {name}" in planned("--ranks", "4", *sets(*keys)).replace("chunks 2 ", "")


def test_a_mistake_in_the_advice_is_not_hidden(monkeypatch):
    def fail(*_):
        raise ScheduleError("a stage is missing")

    monkeypatch.setattr(advice_module, "predict_step", fail)
    with pytest.raises(ScheduleError, match="a stage is missing"):
        show_proof(None, (), 1)


def test_what_is_open_is_said():
    lines = planned("--ranks", "8", "--machine", "h100-80gb", *sets("model.preset=llama3.2-1b")).splitlines()
    assert (
        "data.sequence is open: 128 tokens are assumed, as a run does; "
        "set what is trained, such as --set data.sequence=8192"
    ) in lines
    assert any(line.endswith("--set precision.compute=bf16") for line in lines)
    on_v100 = planned("--ranks", "8", "--machine", "v100", *sets("model.preset=llama3.2-1b"))
    assert "--set precision.compute=fp16" in on_v100
    fixed = sets("model.preset=llama3.2-1b", "data.sequence=128", "batch.global=32", "precision.compute=bf16")
    assert "is open" not in planned("--ranks", "8", "--machine", "h100-80gb", *fixed)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("memory", "shown"), [("70", False), ("10", True)])
def test_what_saves_little_of_the_memory_has_no_line(memory, shown):
    """The same layouts with and without regathering differ by 0.6 GB."""
    given = sets("model.preset=llama3.1-8b", "data.sequence=128", "batch.global=16")
    words = ("--ranks", "16", "--machine", "h100-80gb", "--memory", memory, "--top", "20", *given)
    layouts = re.findall(r"^ ?\d+\. .*(dp .*?)(?:  nearly full)?$", planned(*words), re.M)
    plain = [each.replace(" recompute selective", "").replace(" regather", "") for each in layouts]
    assert (len({*plain}) < len(layouts)) is shown
