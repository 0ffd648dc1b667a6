"""`mpitrain plan` of odd ranks, little memory and wishes that can't be; predictions of slower machines."""

import json
import re
from importlib import resources
from itertools import pairwise

import pytest
from click.testing import CliRunner
from public_models import public_model

from mpitrain.cli import cli
from mpitrain.commands.inspect import show_proof
from mpitrain.commands.plan.planner import find_layouts
from mpitrain.commands.requests import PlanRequest
from mpitrain.errors import ConfigError
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.advice import advice
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.step import predict_step

H100 = machine_of(find_machine("h100-80gb"))
GH200 = machine_of(find_machine("gh200-alps"))
SMALL = ("model.layers=4", "model.width=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128")


def asked(*words):
    return CliRunner().invoke(cli, ["plan", *words])


def sets(*overrides):
    return [word for each in overrides for word in ("--set", each)]


@pytest.mark.parametrize("ranks", [1, 7, 12, 1000])
def test_an_open_batch_divides_over_any_number_of_ranks(ranks, tmp_path):
    out = tmp_path / "best.toml"
    done = asked("--ranks", str(ranks), "--json", "--out", str(out), *sets(*SMALL))
    tree = json.loads(done.output)
    assert tree["best"][0]["layout"]["batch"] >= max(32, ranks)
    assert f"of {ranks} ranks" in " ".join(tree["notes"]) or tree["best"][0]["layout"]["ranks"] == ranks
    assert ranks > 12 or "proved:" in show_proof(str(out), (), ranks)


@pytest.mark.parametrize("key", ["batch.micro=3", "parallel.dp=6", "parallel.pp=3"])
def test_an_open_batch_divides_by_what_is_fixed(key):
    assert json.loads(asked("--ranks", "12", "--json", *sets(*SMALL, key)).output)["best"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.cp=3",), "no layout divides these ranks and the model: cp 3 of 64 ranks; fixed"),
        (("parallel.tp=4", "parallel.pp=32"), "tp 4 x pp 32 = 128 doesn't make 64 ranks; fixed"),
        (("parallel.pp=8",), "8 stages of 4 blocks; fixed"),
        (("batch.global=31",), "of the first: batch.global = 31 doesn't divide into microbatches of "),
        (("parallel.dp_shard=3",), "of the first: parallel.dp_shard = 3 doesn't divide parallel.dp = 64"),
    ],
    ids=str,
)
def test_what_binds_is_named(overrides, message):
    error = asked("--ranks", "64", *sets(*SMALL, *overrides)).exception
    assert error.exit_code == 2 and message in str(error) and "\n" not in str(error)


def test_fixed_gathers_are_those_of_zero_3():
    """Others, which a run refuses, crowded them out."""
    tree = json.loads(asked("--ranks", "8", "--json", *sets(*SMALL, "parallel.gather=step")).output)
    assert {each["layout"]["zero"] for each in tree["best"]} == {3}
    assert tree["left_out"]["refused by a run"] < 3  # a microbatch that is too large


def test_what_is_left_out_is_all_that_was_tried():
    error = asked("--ranks", "8", *sets(*SMALL, "batch.global=96", "pipeline.segments=2")).exception
    tried, reasons = re.search(r"none of (\d+) layouts is left: (.*?) \(of the first", str(error)).groups()
    assert sum(int(number) for number in re.findall(r" (\d+)(?:;|$)", reasons)) == int(tried)


@pytest.mark.parametrize(
    ("ranks", "machine", "gigabytes", "overrides"),
    [
        (8, "h100-80gb", 0.0437, ("model.layers=2", "model.width=1024", "data.sequence=512")),
        (8, "laptop", 0.32, ("model.layers=4", "model.width=1024", "data.sequence=512")),
    ],
)
def test_little_memory_is_enough_where_some_layout_fits(ranks, machine, gigabytes, overrides):
    """By formulas alone the fastest fit, and don't by the plan of a run, which has buffers, too."""
    words = (*overrides, "model.heads=4", "model.kv_heads=2", "batch.global=16", "memory.offload=none")
    found = find_layouts(PlanRequest(overrides=words, machine=machine, memory_gb=gigabytes), ranks)
    assert 0.5 * gigabytes < found.chosen[0].held / 1e9 <= gigabytes


@pytest.mark.parametrize(
    ("context", "rate"), [("zigzag", "forward"), ("ring", "forward"), ("zigzag", "backward")]
)
def test_slower_attention_makes_no_step_faster(context, rate):
    """A ring travels under attention, of which the backward has a rate of its own."""
    shape = public_model("llama3-8b")
    layout = StepLayout(8, 8192, 16, cp=8, context=context, recompute="selective")
    slow_links = GH200._replace(inside=2e9, between=2e9)
    took = [
        predict_step(shape, layout, slow_links._replace(**{f"attention_{rate}": share * 4e14})).seconds
        for share in (1, 0.5, 0.2, 0.1)
    ]
    assert all(after >= before * (1 - 1e-12) for before, after in pairwise(took))


def test_more_tokens_make_no_step_faster():
    """What waits for a reduction waits with the gradients of weights: no other stage waits for it."""
    shape = public_model("bloom-176b")
    keys = dict(tp=8, cp=2, pp=8, chunks=2, schedule="v-half", zero=3, sharded=2, recompute="selective")
    took = [
        predict_step(shape, StepLayout(512, sequence, 32, context="ulysses", micro=8, **keys), GH200).seconds
        for sequence in (1024, 2048, 4096)
    ]
    assert took == sorted(took)


def test_failures_that_leave_no_time_have_no_number_of_days():
    text = asked("--ranks", "4096", "--tokens", "1T", "--node-hours", "1", *sets(*SMALL)).output
    assert text.rstrip().endswith("no time is left between failures and saves")


def test_saves_of_a_node_that_fails_often_are_five_minutes_apart():
    text = asked("--ranks", "8", "--tokens", "1B", "--node-hours", "6", *sets(*SMALL)).output
    assert "every 5 minutes" in text


@pytest.mark.parametrize("option", ["--memory", "--node-hours"])
def test_a_number_beyond_all_machines_is_refused(option):
    assert asked("--ranks", "2", "--tokens", "1B", option, "1e300").exit_code == 2


@pytest.mark.parametrize(
    ("keys", "has"),
    [(dict(), True), (dict(schedule="interleaved", chunks=2), False), (dict(batch=12), False)],
    ids=str,
)
def test_interleaving_is_advised_where_it_can_be(keys, has):
    shape, layout = (
        public_model("gpt-39.1b"),
        StepLayout(**{**dict(ranks=64, sequence=4096, batch=8, tp=8, pp=8), **keys}),
    )
    (line,) = [
        each for each in advice(shape, layout, H100, predict_step(shape, layout, H100)) if "bubble" in each
    ]
    assert ("interleaved" in line) is has


def test_what_is_predicted_to_be_faster_is_not_advised_against():
    shape = public_model("llama3.2-1b")
    slow = H100._replace(inside=3e9, between=3e9)
    layout = StepLayout(8, 4096, 8, tp=1, pp=2)
    found = predict_step(shape, layout, slow)
    simple = predict_step(shape, layout._replace(pp=1), slow)
    assert simple.seconds > 1.05 * found.seconds
    assert not [line for line in advice(shape, layout, slow, found) if "fits without" in line]


def test_all_layouts_are_written(tmp_path):
    out = tmp_path / "layouts.csv"
    tree = json.loads(asked("--ranks", "4", "--json", "--all", str(out), *sets(*SMALL)).output)
    assert len(out.read_text().splitlines()) == 1 + tree["layouts_tried"]


def test_several_numbers_of_ranks_have_a_line_each():
    text = asked("--ranks", "1,2,4", *sets(*SMALL)).output
    assert re.findall(r"^ *(\d+) ", text, re.M) == ["1", "2", "4"]


def test_the_name_of_a_preset_stands_for_it():
    words = "--ranks", "8", "--machine", "h100-80gb", "--json"
    named = json.loads(asked("llama3.2-1b", *words).output)
    assert (
        named["parameters"]
        == json.loads(asked(*words, *sets("model.preset=llama3.2-1b")).output)["parameters"]
    )


def test_where_nothing_fits_it_is_said_what_would():
    error = asked("--ranks", "1", "--machine", "h100-80gb", *sets("model.preset=llama3-70b")).exception
    assert re.search(r"estimate: it would fit with ranks of about [0-9.]+ GB, or about \d+ ranks", str(error))


def test_what_would_fit_on_cpus_has_room_for_their_processes():
    error = asked("--ranks", "2", "--memory", "0.001", *sets(*SMALL)).exception
    enough = re.search(r"it would fit with ranks of about ([0-9.]+) GB", str(error))[1]
    assert asked("--ranks", "2", "--memory", enough, *sets(*SMALL)).exit_code == 0


def test_a_limit_of_no_bytes_is_too_little():
    error = asked("--ranks", "2", "--machine", "h100-80gb", "--memory", "1e-10", *sets(*SMALL)).exception
    assert isinstance(error, ConfigError) and "it would fit with ranks of about" in str(error)


SHEET = (resources.files("mpitrain.jobs") / "machines" / "h100-80gb.toml").read_bytes().decode()
FIGURES = {  # of SHEET, which numbers of others replace
    "bf16": "peak = 989e12, sustained = 794.5e12",
    "bandwidth": "peak = 3350e9, sustained = 2900e9",
    "inside": "peak = 450e9, sustained = 300e9",
    "between": "peak = 50e9, sustained = 32e9",
    "forward": "peak = 989e12, sustained = 288e12",
}
NUMBERS = {
    "bf16": (
        "989 794", "989e3 794e3", "989e6 794e6", "989e12 0.8", "989e12 80.3", "989e12 794e3",
        "989e12 1500e12", "-989e12 794e12", "989e12 -794e12", "nan 794e12", "989e12 nan", "inf 794e12",
        "0 0", "1e30 1e30", "1e300 1e300", "'989T' 794e12", "[989e12] 794e12", "true 794e12",
        "9" + 400 * "0" + " 794e12",
    ),
    "bandwidth": ("3.35 2.9", "3350 2900", "3350e3 2900e3", "3350e6 2900e6", "0 0", "3350e9 nan"),
    "inside": ("450 300", "inf 300e9", "450e9 -inf", "1e30 1e30", "450e12 300e9", "0.0 0.0", "3600e9 2400e9"),
    "between": (
        "400e9 256e9", "400 300", "4500e9 3000e9", "4500e9 32e9", "3.2e12 1.5e12", "0 0", "-50e9 32e9",
        "nan nan",
    ),
    "forward": ("98900e12 28800e12", "98900e12 288e12", "400e9 200e9", "989e12 288e9"),
}  # fmt: skip
KEYS = (
    "memory_bytes = 80", "memory_bytes = 81920", "memory_bytes = -85899345920", "memory_bytes = 80.5",
    "memory_bytes = '80GB'", "memory_bytes = 1e30", "memory_bytes = 85899345920000000",
    "ranks_per_node = 0", "ranks_per_node = -8", "ranks_per_node = 7.5", "ranks_per_node = 9000000",
    "ranks_per_node = 72000", "memory_bytes = 85899345920000",
    "launch_s = 5", "launch_s = 0.005", "launch_s = inf", "inside_latency_s = 3.4", "inside_latency_s = nan",
    "inside_latency_s = -3e-6", "contention = 0.0", "contention = 80", "contended_nodes = 0",
    "contention = 5e-324",
    "memory_bytes = 2097152", "device = 'gpu'", "name = ''", "inside_latency_s = 0.5",
    "between_latency_s = 0.9",
)  # fmt: skip


FP8 = "fp8 = { peak = 1e12, sustained = 1e12"


def _sheets():
    """Yield files of machines that are nonsense, by name."""
    for name, numbers in NUMBERS.items():
        for pair in numbers:
            peak, sustained = pair.split(" ")
            yield (
                f"{name} {pair[:20]}",
                SHEET.replace(FIGURES[name], f"peak = {peak}, sustained = {sustained}"),
            )
    for line in KEYS:
        yield line, re.sub(rf"(?m)^{line.split()[0]} = [^#\n]*", line, SHEET)
    yield "fp8 slower than bf16", re.sub("fp8 = { peak = [0-9e]+, sustained = [0-9.e]+", FP8, SHEET)
    for key in ("host.copy", "host.update", "storage.write"):
        figure = "{ peak = 1e14, sustained = 1e14, peak_source = 'a', sustained_source = 'b' }"
        yield f"{key} of 1e14", f"{key} = {figure}\n{SHEET}"
    yield "another table", SHEET.replace("[links]", "[network]")
    yield "another figure", SHEET.replace("bf16 = {", "bf17 = {")
    yield "no source", re.sub("bf16 = .*", "bf16 = { peak = 989e12, sustained = 794e12 }", SHEET)
    yield "no links", SHEET[: SHEET.index("[links]")]
    yield "a key more", "colour = 1\n" + SHEET
    yield "spread", "spread = [1.4, 1.0, 0.9]\n" + SHEET
    yield "spread of 50", "spread = [0.9, 1.0, 50.0]\n" + SHEET
    yield "start of a day", "start_s = 86400.0\n" + SHEET
    yield "a core for 64 ranks", "cores_per_node = 1\n" + SHEET.replace("per_node = 8", "per_node = 64")
    yield "a peak with sparsity", SHEET.replace("peak = 989e12", "peak = 1979e12")
    yield from {
        "nothing": "",
        "half": SHEET[:900],
        "JSON": "{}",
        "too large": SHEET + "#" * (1 << 17),
    }.items()


NONSENSE = {name: text.encode() for name, text in _sheets()} | {
    "UTF-16": SHEET.encode("utf-16"),
    "compressed": b"\x1f\x8b\x08" + bytes(99),
    "binary": b"\x7fELF\x02\x01" + bytes(500),
    "brackets": b"a = " + b"[" * 5000,
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_machine_that_cannot_be_is_refused_in_words(name, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_bytes(NONSENSE[name])
    assert NONSENSE[name] != SHEET.encode()
    with pytest.raises(
        ConfigError,
        match=r"needed|not valid TOML|give the path of a TOML file|no key needs|found no|is above",
    ):
        find_machine(str(path))


def test_a_figure_without_a_source_is_named(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_bytes(NONSENSE["no source"])
    with pytest.raises(ConfigError, match=r"field `peak_source` - at `\$\.products\.bf16`; needed the keys"):
        find_machine(str(path))
