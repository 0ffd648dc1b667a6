"""What `mpitrain plan` reads of a configuration's machine and memory, and what it writes of a layout."""

import csv
import itertools
import json
import random
import shlex
import subprocess
import tomllib
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from click.testing import CliRunner
from public_models import public_model

from mpitrain import config as settings
from mpitrain.cli import cli
from mpitrain.comm.base.interpreter import python
from mpitrain.commands.inspect import show_program, show_proof
from mpitrain.commands.plan.planner import find_layouts
from mpitrain.commands.plan.sweep_layouts import config_of, machine_name, plan_on, predicted_step, rates_for
from mpitrain.commands.requests import PlanRequest, SweepRequest
from mpitrain.data.tokenizer import tokenizer_of, vocabulary_of
from mpitrain.errors import ConfigError
from mpitrain.origins import FOLDER, KeyOrigin
from mpitrain.plan import program
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.process_memory import BEFORE_A_MODEL
from mpitrain.plan.predict.step_time import advice as advice_module
from mpitrain.plan.predict.step_time.layout import require_possible
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.step import predict_step
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.planner.after_run import step_terms
from mpitrain.planner.choice import planned as planned_layout
from mpitrain.planner.layout_request import LayoutRequest
from mpitrain.planner.measured_run import MeasuredRun
from mpitrain.planner.run_layout import choose_layout
from mpitrain.schedules.catalog import FAMILIES, NAMES

H100 = machine_of(find_machine("h100-80gb"))
SMALL = ("model.layers=4", "model.width=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128")


def planned(*words):
    done = CliRunner().invoke(cli, ["plan", *words])
    assert done.exit_code == 0, done.exception or done.output
    return done.output


def sets(*overrides):
    return [word for each in overrides for word in ("--set", each)]


def test_what_was_given_and_chosen_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("optimizer.lr=0.002", "precision.compute=fp32", "memory.recompute=none")
    words = ("--ranks", "4", "--machine", "laptop", "--memory", "2", "--tokens", "1M", "--out", "p.toml")
    planned(*words, *sets(*SMALL, *given))
    written = settings.flatten(settings.load("p.toml"))
    tree = tomllib.loads((tmp_path / "p.toml").read_text())
    keys = {f"{table}.{key}" for table, keys in tree.items() for key in keys}
    typed = {each.partition("=")[0] for each in (*SMALL, *given)}
    layout = {"parallel.tp", "parallel.cp", "parallel.pp", "parallel.dp", "parallel.zero", "batch.micro",
              "pipeline.schedule", "batch.global"}  # fmt: skip
    assert keys == typed | layout | {"run.dir", "run.steps", "run.machine", "memory.limit_gb"}
    assert (written["run.dir"], written["run.machine"], written["memory.limit_gb"]) == ("runs/p", "laptop", 2)
    tokens = written["batch.global"] * written["data.sequence"]
    assert (written["run.steps"] - 1) * tokens < 1e6 <= written["run.steps"] * tokens


def test_a_plan_has_a_run_directory_of_its_own(tmp_path, monkeypatch):
    """The user's stays; a folder that is there isn't taken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "p").mkdir(parents=True)
    planned("--ranks", "2", "--out", "p.toml", *sets(*SMALL))
    assert settings.load("p.toml").run.dir == "runs/p-2"
    planned("--ranks", "2", "--out", "p.toml", *sets(*SMALL, "run.dir=runs/p"))
    assert settings.load("p.toml").run.dir == "runs/p"


def test_what_model_init_gives_is_not_written():
    given = settings.read(None, ["model.init=some/run"])
    begun = given.with_values({"model.layers": 2}, KeyOrigin(FOLDER, "some/run"))
    assert tomllib.loads(settings.given_toml(begun)) == {"model": {"init": "some/run"}}
    imported = settings.read(None, []).with_values({"model.layers": 2}, KeyOrigin(FOLDER, "some/folder"))
    assert tomllib.loads(settings.given_toml(imported)) == {"model": {"layers": 2}}


@pytest.mark.parametrize("name", ["p.toml", "-x.toml", "it's my plan.toml", "größe $HOME.toml"])
def test_the_printed_command_has_the_file_as_one_word(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    last = planned("--ranks", "3", f"--out={name}", *sets(*SMALL)).splitlines()[-1]
    *command, path = shlex.split(last.partition(": ")[2] if "'" not in last else last[last.index("mpirun") :])
    assert command == ["mpirun", "-n", "3", "mpitrain", "run"] and not path.startswith("-")
    assert (tmp_path / path).samefile(tmp_path / name)


@pytest.mark.parametrize(("key", "machine"), [("run.machine=h200", "h200"), ("run.device=auto", "laptop")])
def test_the_machine_of_a_configuration_predicts(key, machine):
    """--machine overrides it. A plan, and a sweep; limits are that machine's."""
    found = find_layouts(PlanRequest(overrides=(*SMALL, key)), 2, node_ranks=2)
    assert found.rates.name == find_machine(machine).name
    assert found.limit == 0.9 * find_machine(machine).memory_bytes
    other = find_layouts(PlanRequest(overrides=(*SMALL, key), machine="a100-80gb"), 2)
    assert other.rates.name == find_machine("a100-80gb").name
    sweep = SweepRequest(overrides=(*SMALL, key))
    assert machine_name(sweep) == machine
    assert rates_for(sweep, config_of(sweep).config, 2).name == find_machine(machine).name
    assert machine_name(replace(sweep, machine="a100-80gb")) == "a100-80gb"


def test_the_nodes_of_a_configuration_are_those_of_every_line():
    """comm.node_ranks overrides the ranks that a launcher has put on a node."""
    keys = (*SMALL, "comm.node_ranks=2", "run.machine=h100-80gb")
    assert find_layouts(PlanRequest(overrides=keys), 8, node_ranks=8).rates.ranks_per_node == 2
    sweep = SweepRequest(overrides=keys)
    assert rates_for(sweep, config_of(sweep).config, 8).ranks_per_node == 2


def test_a_limit_is_that_of_the_configuration_and_of_a_whole_process():
    tree = json.loads(planned("--ranks", "2", "--json", *sets(*SMALL, "memory.limit_gb=0.3")))
    assert tree["best"][0]["memory_limit_bytes"] == 0.3e9
    assert BEFORE_A_MODEL < tree["best"][0]["held_bytes"] <= 0.3e9
    tree = json.loads(
        planned("--ranks", "2", "--json", "--memory", "0.4", *sets(*SMALL, "memory.limit_gb=9"))
    )
    assert tree["best"][0]["memory_limit_bytes"] == 0.4e9


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("limit", ["memory.limit_gb=0.26", "memory.limit_gb=0.4", "run.machine=a100-40gb"])
@pytest.mark.parametrize("more", ["batch.global=96", "precision.compute=bf16", "comm.node_ranks=2"])
def test_a_run_has_room_for_what_was_planned(tmp_path, ranks, limit, more):
    """One limit, by one rule: what plan writes is not refused by check, program and run."""
    out = tmp_path / "best.toml"
    planned("--ranks", str(ranks), "--out", str(out), *sets("model.layers=4", limit, more))
    assert "proved:" in show_proof(str(out), (), ranks)


LARGE = (
    *("model.layers=6", "model.width=16384", "model.ffn=65536", "model.heads=64"),
    *("parallel.tp=1", "parallel.pp=1", "run.machine=h100-80gb"),
)


def test_no_command_plans_what_a_named_machine_has_no_room_for():
    for refused in (
        lambda: show_proof(None, LARGE, 8),
        lambda: show_program(None, LARGE, 8, 0),
        lambda: plan_on(settings.read(None, LARGE), JobRanks(8, 1, 8)),
        lambda: find_layouts(PlanRequest(overrides=(*LARGE, "parallel.zero=0")), 8),
    ):
        with pytest.raises(ConfigError, match=r"GB|memory"):
            refused()


MIXTRAL = ("model.preset=mixtral-8x7b", "batch.global=64", "precision.compute=bf16", "run.machine=h100-80gb")


@pytest.mark.parametrize(
    ("fixed", "said", "unsaid"),
    [
        (("parallel.tp=16", "comm.node_ranks=8"), "as given: parallel.tp = 16", "tp within a node"),
        (("parallel.zero=1",), "as given: parallel.zero = 1", "ZeRO-1 always"),
        (("parallel.tp=2", "parallel.ep=4", "parallel.etp=2"), "parallel.etp = 2", "divided apart from tp"),
        (("parallel.tp=8",), "as given: parallel.tp = 8", "tp within a node"),
    ],
    ids=str,
)
def test_rules_that_decided_are_true_of_the_layout_below_which_they_stand(fixed, said, unsaid):
    """Of what the user has fixed, no rule has decided."""
    answer = find_layouts(PlanRequest(overrides=(*MIXTRAL, *fixed), top=2), 16)
    text = answer.as_text()
    assert said in text and unsaid not in text
    layout, machine = answer.chosen[0].candidate.layout, answer.rates
    assert ("tp within a node" in text) <= (1 < layout.tp <= machine.ranks_per_node)
    assert ("ZeRO-1 always" in text) <= (layout.zero == 1)
    simpler = [
        each for each in answer.chosen if each.candidate.complexity > answer.chosen[0].candidate.complexity
    ]
    assert ("the simpler" in text) <= bool(simpler)


def test_advice_counts_the_memory_that_a_plan_is_held_to():
    """Not that of the whole machine, of which a limit leaves a part."""
    keys = ("model.layers=4", "model.width=1024", "data.sequence=512", "model.heads=4", "batch.global=16")
    answer = find_layouts(PlanRequest(overrides=(*keys, "memory.limit_gb=0.45")), 8)
    assert answer.rates.memory_bytes == 0.45e9
    assert not [line for line in answer.as_tree()["advice"] if "fits without" in line]
    roomy = find_layouts(PlanRequest(overrides=(*keys, "parallel.zero=3")), 8).as_tree()["advice"]
    assert [line for line in roomy if "fits without" in line]


MOST_STEPS = 16  # that are predicted for all advice of a layout


def random_layout(rng):
    """Return a layout that can be, of some model, and a machine with few ranks a node."""
    while True:
        shape = public_model(rng.choice(["llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b"]))
        tp, cp, pp, dp = (rng.choice([1, 2, 4, 16]) for _ in range(4))
        keys = {"tp": tp, "cp": cp, "pp": pp, "zero": rng.choice([0, 1, 3]) if dp * cp > 1 else 0}
        keys |= {"sharded": rng.choice([0, 1, 2])} if keys["zero"] else {}
        keys |= {"ep": rng.choice([1, 2, 8]), "etp": rng.choice([1, 2, 16])} if shape.experts else {}
        keys |= {"context": rng.choice(["zigzag", "gather"]), "recompute": rng.choice(["none", "full"])}
        machine = H100._replace(ranks_per_node=rng.choice([1, 2, 8]))
        layout = StepLayout(tp * cp * pp * dp, rng.choice([4096, 32768]), dp * rng.choice([1, 4, 16]), **keys)
        with suppress(ConfigError):
            require_possible(layout, shape)
            return shape, layout, machine, predict_step(shape, layout, machine)


def test_advice_predicts_few_steps_of_any_layout(monkeypatch):
    """A bound of work, not of time; and no layout that can be is one that it can't judge."""
    predicted = []

    def counted(*given):
        predicted.append(predict_step(*given))
        return predicted[-1]

    monkeypatch.setattr(advice_module, "predict_step", counted)
    rng = random.Random(5)
    said = 0
    for _ in range(60):
        predicted.clear()
        said += len(advice_module.advice(*random_layout(rng)))
        assert len(predicted) <= MOST_STEPS
    assert said > 60


def test_advice_loads_its_own_modules_alone():
    code = (
        "import sys, mpitrain.training.prepare; before = {*sys.modules}; "
        "import mpitrain.plan.predict.step_time.advice; print(*({*sys.modules} - before))"
    )
    done = subprocess.run([*python(), "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.split()
    assert loaded and all(name.startswith("mpitrain.") for name in loaded)


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].copies == 1])
def test_a_line_holds_what_memory_says_of_all_microbatches(name):
    """Of gpipe's 40 the six were counted that a pipeline of two fills itself with."""
    fixed = (
        "parallel.tp=1",
        "parallel.pp=2",
        f"pipeline.schedule={name}",
        "batch.global=40",
        "batch.micro=1",
    )
    answer = find_layouts(PlanRequest(overrides=(*SMALL, *fixed, "data.sequence=64"), machine="h100-80gb"), 2)
    for line in answer.chosen:
        usages = predict(planned_layout(line.config, 2, answer.rates), on_gpu=True)
        assert line.held == max(usage.on_device for usage in usages), line.candidate.layout.describe()


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(1, ("pipeline.tail=5",)), (2, ("parallel.pp=2", "pipeline.schedule=interleaved", "pipeline.group=8"))],
)
def test_a_tail_and_a_group_hold_what_memory_says(ranks, more):
    fixed = ("parallel.tp=1", "batch.global=40", "batch.micro=1", "data.sequence=64", "memory.recompute=none")
    answer = find_layouts(PlanRequest(overrides=(*SMALL, *fixed, *more), machine="h100-80gb"), ranks)
    for line in answer.chosen:
        usages = predict(planned_layout(line.config, ranks, answer.rates), on_gpu=True)
        assert line.held == max(usage.on_device for usage in usages), line.candidate.layout.describe()


@pytest.mark.parametrize("last", ["", "F3@1 B3@1"])
def test_a_table_of_many_microbatches_is_planned_and_a_wrong_one_refused(tmp_path, last):
    rows = ["F0@0 F1@0 " + " ".join(f"B{m}@0 F{m + 2}@0" for m in range(18)) + " B18@0 B19@0",
            " ".join(f"F{m}@1 B{m}@1" for m in range(20))]  # fmt: skip
    table = tmp_path / "own.txt"
    table.write_text("".join(f"rank {rank}: {row}\n" for rank, row in enumerate(rows)))
    keys = (f"pipeline.schedule={table}", "parallel.pp=2", "batch.global=20", "batch.micro=1")
    if last:  # the first rank waits for B0, the second for F3
        table.write_text(f"rank 0: {rows[0]}\nrank 1: {last} " + rows[1].replace(f" {last}", ""))
        with pytest.raises(ConfigError, match=r"of the first: .*(must ascend|deadlock)"):
            find_layouts(PlanRequest(overrides=(*SMALL, *keys), machine="h100-80gb"), 2)
        return
    assert find_layouts(PlanRequest(overrides=(*SMALL, *keys), machine="h100-80gb"), 2).chosen


def test_programs_are_proved_of_lines_alone(monkeypatch):
    proved = []
    check = program.check
    monkeypatch.setattr(
        program, "check", lambda *given, **keys: proved.append(given) or check(*given, **keys)
    )
    answer = find_layouts(PlanRequest(overrides=(*SMALL, "batch.global=16"), machine="h100-80gb", top=3), 4)
    assert len(answer.found.every) > 20 and 1 <= len(proved) <= len(answer.chosen) == 3
    assert all(one != other for one, other in itertools.combinations(proved, 2))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_simpler_wins_only_over_layouts_that_are_as_fast(ranks):
    """Seconds of both are predictions, neither times the middle of a machine's steps."""
    answer = find_layouts(PlanRequest(overrides=SMALL, machine="h100-80gb", top=10), ranks)
    best, *others = (each.candidate for each in answer.chosen)
    beaten = [each for each in others if each.complexity > best.complexity]
    as_fast = any(each.found.seconds <= best.found.seconds for each in beaten)
    assert beaten and as_fast == ("of layouts that are as fast, the simpler" in answer.as_text())


def test_all_layouts_say_why_they_are_left_out(tmp_path):
    table, picture = tmp_path / "all.csv", tmp_path / "all.svg"
    words = ("--ranks", "4", "--machine", "h100-80gb", "--top", "3", *sets(*SMALL, "batch.global=16"))
    tree = json.loads(planned(*words, "--json", "--all", str(table)))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == tree["layouts_tried"]
    reasons = Counter(row["left_out_by"] for row in rows if row["left_out_by"])
    assert reasons == tree["left_out"]
    places = {int(row["place"]): row for row in rows if row["place"]}
    assert sorted(places) == list(range(1, 1 + len(tree["best"])))
    assert [places[1][f"parallel.{axis}"] for axis in ("tp", "pp", "dp")] == [
        str(tree["best"][0]["layout"][axis]) for axis in ("tp", "pp", "dp")
    ]
    for place, best in enumerate(tree["best"], start=1):
        assert float(places[place]["least_seconds"]) <= best["seconds"] * (1 + 1e-5)  # six digits
    planned(*words, "--all", str(picture))
    assert b"GB of a rank" in picture.read_bytes()


@pytest.mark.parametrize("machine", ["h100-80gb", "laptop"])
def test_a_step_has_one_prediction_in_all_that_is_printed(machine, tmp_path):
    """By figures of data sheets steps take 1.06 times what these predict, in the median."""
    degrees = [f"parallel.{axis}=1" for axis in ("tp", "cp", "pp", "dp", "ep", "etp")]
    memory = ("memory.recompute=none", "memory.offload=none")
    fixed = (*degrees, *memory, "pipeline.schedule=1f1b", "batch.micro=1")
    given = (*SMALL, *fixed, "batch.global=2", "data.sequence=256", f"run.machine={machine}")
    words = ("--ranks", "1", "--json", "--top", "1", "--timeline", str(tmp_path / "step.json"))
    (best,) = json.loads(planned(*words, *sets(*given)))["best"]
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    end_s = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") / 1e6
    # a GPU's steps also take what no figure of a machine says
    assert end_s == pytest.approx(best["seconds"] - best["parts_s"]["stragglers"], rel=0.01)
    plan = plan_on(settings.read(None, given), JobRanks(1, 1, 1))
    rates = rates_for(SweepRequest(), plan.config, 1)
    assert predicted_step(plan, rates).seconds == pytest.approx(best["seconds"], rel=1e-9)
    run = MeasuredRun(plan, 1.0, 9, [{}], 8, 1, 1, "", 1e11, 1, None)
    assert sum(step_terms(run).predicted.values()) == pytest.approx(best["seconds"], rel=1e-9)
    asked = settings.read(None, (*SMALL, "batch.global=2", *given[-2:], "run.layout=planned"))
    vocabulary = vocabulary_of(tokenizer_of(plan.config.data))
    answer = choose_layout(LayoutRequest(*asked, JobRanks(1, 1, 1), vocabulary))
    assert f"{best['seconds']:.3g} s a step" in answer.lines[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "best.csv"), "--out best.csv: found '.csv', needed one of .toml"),
        (("--all", "all.txt"), "--all all.txt: found '.txt', needed one of .csv .svg .png"),
        (2 * ("--what-if", "launch_s=2x"), "--what-if launch_s: found 2 factors; give one"),
    ],
)
def test_what_a_plan_cannot_write_or_change_is_refused(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["plan", "--ranks", "2", *sets(*SMALL), *words])
    assert message in str(done.exception)
    assert not list(tmp_path.iterdir())
