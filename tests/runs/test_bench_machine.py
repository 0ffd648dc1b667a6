"""`mpitrain bench machine`: all that a plan needs is measured, of ranks that compute and send."""

import os
import subprocess
import sys
import time
import tomllib
from dataclasses import replace

import msgspec
import pytest
import torch
from conftest import LONG
from launch import MPITRAIN, mpirun, tail

from mpitrain.comm.base.interpreter import python
from mpitrain.commands.plan.planner import find_layouts
from mpitrain.commands.requests import PlanRequest
from mpitrain.errors import ConfigError
from mpitrain.measuring import device, measured_machine, storage
from mpitrain.measuring.device import Samples, measured_host
from mpitrain.measuring.measured_machine import MeasuredFigure, machine_of, together
from mpitrain.measuring.measured_rounds import (
    MOST_LOST,
    CoreTime,
    MeasuredRounds,
    doubts_of,
    measured_in_rounds,
)
from mpitrain.plan.predict.step_time.machine import known, read_machine
from mpitrain.training.machine.gpus import Gpu

DEVICE = {
    "products.bf16": 7e14, "products.fp8": 1.3e15, "attention.forward": 2.8e14, "attention.backward": 1.9e14,
    "memory.bandwidth": 4.2e12, "launch_s": 7e-6,
}  # fmt: skip
LINKS = {"links.inside": 3e9, "links.inside_latency_s": 4e-4}
H200 = Gpu("NVIDIA H200", "GPU-a", 140 << 30, "9.0")


def figures(**rates):
    return {name: MeasuredFigure(value, 0.02) for name, value in {**DEVICE, **rates}.items()}


TWICE = """
from mpitrain import cli
from mpitrain.measuring import measured_rounds

measured_rounds.LEAST_ROUNDS = measured_rounds.MOST_ROUNDS = measured_rounds.ENOUGH
cli.main()
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What two ranks print, the machine that they write, and the folder whose storage they measure.

    Tests share these cores: rounds hardly agree, and two do.
    """
    folder = tmp_path_factory.mktemp("machine") / "checkpoints"
    folder.mkdir()
    path, program = folder.parent / "m.toml", folder.parent / "twice.py"
    program.write_text(TWICE)
    words = ("bench", "machine", "--out", str(path), "--storage", str(folder))
    return mpirun(2, sys.executable, str(program), *words), path, folder


def test_two_ranks_measure_and_a_plan_reads_it(measured):
    done, path, _ = measured
    found = read_machine(str(path))
    assert done.returncode == bool(found.disturbed), tail(done.output)  # tests share these cores
    assert ("it can't be trusted" in done.output) == bool(found.disturbed)
    assert found.device == "cpu" and found.ranks_per_node == 2
    kinds = {"fp32", "bf16", "fp64"}
    kinds |= {f"{kind}_small" for kind in kinds} | {"fp32_grouped", "bf16_grouped"}
    assert set(found.products) == kinds and found.products["fp64"].sustained > 1e8
    assert 1e7 < found.links.inside.sustained < 1e12
    assert found.links.inside.peak_source == "as measured"
    assert found.links.between == known()["laptop"].links.between
    assert "2 ranks" in found.attention["forward"].sustained_source
    rows = [line for line in done.output.splitlines() if line.endswith("%")]
    assert {"forward_short", "backward_short", "forward_16_short", "backward_16_short"} < set(found.attention)
    assert 1e6 < found.memory["passes"].sustained < 1e12
    assert 0 < found.start_s < 600 and f"start-up took {found.start_s:.2f} s" in done.output
    assert len(rows) == 22 and "links between: no two ranks have such a link" in done.output, done.output
    planned = mpirun(0, MPITRAIN, "plan", "--ranks", "2", "--machine", str(path))
    assert planned.returncode == 0 and found.name in planned.output, tail(planned.output)


@LONG
def test_four_ranks_measure_their_pairs_too(tmp_path):
    path = tmp_path / "m.toml"
    done = mpirun(4, MPITRAIN, "bench", "machine", "--out", str(path))
    assert done.returncode in (0, 1) and "links.pair" in done.output, tail(done.output)
    links = read_machine(str(path)).links
    assert 1e7 < links.pair.sustained < 1e12 and 0 < links.pair_latency_s < 1


def test_what_a_node_writes_is_measured_where_checkpoints_are_to_be(measured):
    done, path, folder = measured
    assert done.returncode in (0, 1), tail(done.output)
    assert "storage.write" in done.output and not list(folder.iterdir())
    written = read_machine(str(path)).storage["write"].sustained
    assert 1e6 < written < 1e12
    words = ("--ranks", "2", "--tokens", "1B", "--machine", str(path))
    planned = mpirun(0, MPITRAIN, "plan", *words)
    assert "s (by storage.write of" in planned.output, tail(planned.output)


class DisturbedClock:
    """A clock for which work of a second takes longer in some rounds, by a factor of each repeat."""

    def __init__(self, factors):
        self.factors = factors
        self.rounds = 0

    def measure(self):
        took = [factor * (1 + 0.01 * number) for number, factor in enumerate(self.factors[self.rounds])]
        self.rounds += 1
        yield Samples("products.fp32", [1e11 / seconds for seconds in took])
        yield Samples("launch_s", took)


QUIET, HALVED, ONCE = (1.0, 1.0, 1.0), (2.0, 2.1, 1.9), (1.0, 3.0, 1.0)
SLOWER = [[2.0**-number] * 3 for number in range(8)]


@pytest.mark.parametrize(
    ("factors", "rounds", "is_settled"),
    [
        ([QUIET] * 3, 3, True),
        ([HALVED, HALVED, QUIET, QUIET], 4, False),  # the first two agree, and the third is settled
        ([HALVED, QUIET, HALVED, ONCE], 4, True),
        ([QUIET, HALVED, QUIET], 3, True),
        (SLOWER, 8, False),
    ],
    ids=["quiet", "quiet later", "now and then", "disturbed once", "never twice alike"],
)
def test_rounds_are_repeated_until_the_best_values_agree(factors, rounds, is_settled):
    """Of a disturbed clock: what was slow is in no figure, and what never agrees is said."""
    clock = DisturbedClock(factors)
    found = measured_in_rounds(clock.measure, lambda is_done: is_done)
    assert clock.rounds == rounds
    doubts = doubts_of([0.0], [found.unsettled()], found.count())
    assert (not doubts) or factors is SLOWER
    if factors is not SLOWER:
        rate, launch = (together([[each]])[each.name] for each in found.samples())
        assert rate.median == pytest.approx(1e11, rel=0.05) and launch.median == pytest.approx(1.0, rel=0.05)
    else:
        assert doubts == ["no two of 8 rounds agree within 10% in products.fp32, launch_s"]


def test_time_that_others_have_the_core_is_a_doubt():
    """More ranks than cores wait for each other, which is expected."""
    lost = MeasuredRounds({}, [0.6, 0.02, 0.5])
    assert lost.lost_more(0.0) == 0.5 and lost.lost_more(0.5) == 0.0
    assert MeasuredRounds({}, [0.6, 0.02, 0.03]).lost_more(0.0) == 0.0


def test_reasons_of_several_ranks_stand_once():
    assert doubts_of([0.0, 0.0], [[], []], 3) == []
    assert doubts_of([0.25, 0.5], [["memory.passes", "launch_s"], ["launch_s", "products.fp32"]], 8) == [
        "other programs had the cores for 50% of the time",
        "no two of 8 rounds agree within 10% in memory.passes, launch_s, products.fp32",
    ]
    before, after = CoreTime(1.0, 1.0, 1.0), CoreTime(4.0, 1.5, 1.5)
    assert after.lost_since(before) == pytest.approx(1 / 3.5)


def test_a_load_on_the_same_core_is_seen():
    now = CoreTime.now()
    if now is None:
        pytest.skip("this system doesn't say how long threads wait for a core")
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})  # the load inherits it
    load = subprocess.Popen([*python(), "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        before = CoreTime.now()
        end = time.perf_counter() + 1.0
        while time.perf_counter() < end:
            pass
        assert CoreTime.now().lost_since(before) > 2 * MOST_LOST
    finally:
        load.kill()
        load.wait()
        os.sched_setaffinity(0, mine)


def test_a_plan_says_that_the_figures_were_disturbed(tmp_path):
    why = "other programs had the cores for 50% of the time"
    base = known()["laptop"]
    path = tmp_path / "m.toml"
    for disturbed in ([], [why]):
        path.write_text(msgspec.structs.replace(base, disturbed=disturbed).to_toml())
        assert ("disturbed" in path.read_text()) == bool(disturbed)
        answer = find_layouts(PlanRequest(machine=str(path)), 2)
        assert [note for note in answer.notes if why in note and "measure it again" in note] == [
            f"the figures of {base.name} can't be trusted: {why}; measure it again"
        ][: len(disturbed)]


def test_backward_of_short_attention_is_timed_by_itself(monkeypatch):
    """As the difference of two times it was up to 374,658,622 % off; here the forward takes longer."""
    times = iter(range(1000))
    monkeypatch.setattr(device, "_seconds", lambda work, _: work() is None or next(times) % 2 + 1.0)
    forward, backward = device._attention(torch.device("cpu"), torch.float32, (1, 2, 1, 16, 8))
    flops = 2.0 * 2 * 16 * 16 * 8
    assert backward.values == [2.5 * flops / 2.0] * 3 and forward.values == [flops] * 3


@pytest.mark.parametrize("folder", ["no-such", "m.txt", "a\0b", ""])
def test_what_is_no_folder_for_checkpoints_is_one_error(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.txt").write_text("")
    with pytest.raises(ConfigError, match=r"--storage .*: .+; needed a folder of yours") as error:
        storage.require_folder(folder)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("folder", ["no-such"])
def test_a_folder_for_checkpoints_that_is_none_is_refused_before_anything_is_measured(tmp_path, folder):
    (tmp_path / "m.txt").write_text("")
    out = tmp_path / "m.toml"
    words = ("--out", str(out), "--storage", str(tmp_path / folder))
    done = mpirun(2, MPITRAIN, "bench", "machine", *words)
    assert done.returncode == 2 and done.output.count("needed a folder of yours") == 1, tail(done.output)
    assert not out.exists()


def test_ranks_that_share_cores_are_measured_as_if_each_had_one():
    rate, launch, link = (Samples(name, [8.0]) for name in ("products.fp32", "launch_s", "links.inside"))
    of_two = [measured_machine.samples_of_core(each, 8, 2).values for each in (rate, launch, link)]
    assert of_two == [[32.0], [2.0], [8.0]]
    assert measured_machine.samples_of_core(rate, 1, 2) == rate


def test_a_host_updates_and_is_copied_to():
    before = torch.get_num_threads()
    found = {each.name: each.values for each in measured_host(torch.device("cpu"), before + 1)}
    assert found.keys() == {"host.copy", "host.update"} and torch.get_num_threads() == before
    assert all(1e5 < value < 1e13 for values in found.values() for value in values)
    host = machine_of(
        figures(**{"host.copy": 5e10, "host.update": 1.5e9}), known()["h100-80gb"], H200, 1, 1, "here"
    ).host
    assert (host["copy"].sustained, host["update"].sustained) == (5e10, 1.5e9)


def test_a_figure_is_the_median_of_all_ranks_and_says_how_far_they_are_apart():
    ranks = [[Samples("launch_s", [1.0, 2.0, 3.0])], [Samples("launch_s", [3.0, 4.0, 5.0])]]
    assert together(ranks) == {"launch_s": MeasuredFigure(3.0, pytest.approx((4.25 - 1.75) / 3.0))}


def test_a_gpu_has_the_peaks_of_one_like_it_and_no_peak_is_below_what_was_measured():
    base = known()["h200"]
    found = machine_of(figures(**LINKS | {"products.fp64": 5e13}), base, H200, 2, 2, "here")
    assert (
        found.products["bf16"].peak == base.products["bf16"].peak > found.products["bf16"].sustained == 7e14
    )
    assert found.products["fp64"].peak == found.products["fp64"].sustained == 5e13  # of no data sheet here
    assert found.memory_bytes == 140 << 30 and found.ranks_per_node == 2
    assert found.links.inside.sustained == 3e9 and found.links.inside_latency_s == 4e-4
    assert found.links.between == base.links.between
    faster = machine_of(figures(**{"products.bf16": 2e15}), base, H200, 1, 1, "here")
    assert faster.products["bf16"].peak == 2e15 and faster.ranks_per_node == base.ranks_per_node
    assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found


@pytest.mark.parametrize(("gpu", "base", "expected"), [(None, "laptop", 1), (H200, "h200", 8)])
def test_ranks_that_are_alone_on_their_hosts_measure_a_card_that_others_would_share(
    monkeypatch, gpu, base, expected
):
    monkeypatch.setattr(measured_machine.library, "host", lambda: "here")  # MPI's word; this is no rank
    rates = {"products.fp32": 5e10, "links.between": 1e8, "links.between_latency_s": 1e-4}
    found = machine_of(figures(**rates), known()[base], gpu, 1, 1, "here")
    assert found.ranks_per_node == expected and found.links.between.sustained == 1e8


@pytest.mark.parametrize(
    ("name", "like"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("Tesla V100", "v100")],
)
def test_a_machine_like_it_is_found_by_the_name_of_the_gpu(name, like):
    placement = type("Placement", (), {"gpu": replace(H200, name=name)})
    assert measured_machine._like(None, placement) == known()[like]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "{}/missing/m.toml"), "--out {0}/missing/m.toml: no folder {0}/missing; needed a file"),
        (("--out", "{}/m.json"), "--out {0}/m.json: found '.json', needed one of .toml"),
        pytest.param(
            ("--out", "{}/m.toml", "--like", "h20"),
            "machine h20: found no such machine; did you mean",
            marks=LONG,
        ),
        pytest.param(("--out", "{}/m.toml", "--set", "run.threads=0.5"), "run.threads", marks=LONG),
        (("--out", "{}/m.toml", "--set", "parallel.tp=2"), "--set parallel.tp does nothing"),
    ],
)
def test_what_cannot_be_done_is_said_once_and_nothing_is_written(tmp_path, options, message):
    done = mpirun(2, MPITRAIN, "bench", "machine", *(word.format(tmp_path) for word in options))
    assert done.returncode == 2, tail(done.output)
    assert done.output.count(message.format(tmp_path)) == 1, tail(done.output)
    assert not list(tmp_path.iterdir())


def test_the_file_is_toml_that_names_where_and_when(tmp_path):
    made = machine_of(
        figures(), known()["h200"], H200, 1, 1, "mpitrain bench machine, 1 ranks, node7, 2026-11-26"
    )
    tree = tomllib.loads(made.to_toml())
    source = tree["products"]["bf16"]["sustained_source"]
    assert source == "mpitrain bench machine, 1 ranks, node7, 2026-11-26, spread 2.0%"
    (tmp_path / "m.toml").write_text(made.to_toml())
    assert read_machine(str(tmp_path / "m.toml")) == made
