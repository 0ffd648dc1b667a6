"""`mpitrain run --calibrate`: constants that a run measured, each where it can tell, in a machine's file."""

import os
from datetime import date

import msgspec
import pytest
from launch import run_commands, tail
from pages import ROOT

from mpitrain.comm.meters.account import AxisUsage
from mpitrain.commands.inspect import planned
from mpitrain.errors import ConfigError
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of, read_machine
from mpitrain.planner.after_run import machine_of_run, predicted_terms
from mpitrain.planner.calibrate import calibrate, calibrated
from mpitrain.planner.calibration_file import CalibrationFile
from mpitrain.planner.measured_run import MeasuredRun

# products take most of the time, and so does their bandwidth of what dp sends
LARGE = ("model.layers=2", "model.width=2048", "model.ffn=8192", "data.sequence=512", "batch.global=16")
# messages of tp are a large part
NARROW = ("model.layers=2", "model.width=128", "model.heads=4", "model.kv_heads=4", "model.ffn=512",
          "data.sequence=1024", "batch.global=16", "batch.micro=4")  # fmt: skip
SMALL = ("model.layers=4", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn=96",
         "data.sequence=16", "batch.global=8")  # fmt: skip
COUNTED = 10
DAY = date(2026, 11, 26)


def ended(keys, factors, ranks=4, machine=""):
    """Return a run whose parts took factors times what is predicted of them."""
    plan = planned(None, (*keys, f"run.machine={machine}"), ranks)
    run = MeasuredRun(plan, 1.0, 10, [{}] * ranks, COUNTED, ranks, 2, "", 100e9, 10**6, None)
    parts = predicted_terms(run, machine_of(machine_of_run(run)[0]))
    took = {name: factors.get(name, 1.0) * seconds for name, seconds in parts.items()}
    usages = {
        name: AxisUsage(1, 0, COUNTED * seconds) for name, seconds in took.items() if name != "computing"
    }
    return run._replace(step_s=sum(took.values()), usages=[usages] * ranks)


def ratio(run, machine):
    """Return measured over predicted."""
    return run.step_s / sum(predicted_terms(run, machine_of(machine)).values())


def test_throughput_and_bandwidth_are_seen_in_their_parts(tmp_path):
    laptop = (ROOT / "mpitrain/jobs/machines/laptop.toml").read_text()
    (tmp_path / "slow.toml").write_text(laptop.replace("sustained = 4e9", "sustained = 5e7"))
    run = ended((*NARROW, "parallel.tp=4"), {"computing": 1.5, "tp": 3.0}, machine=tmp_path / "slow.toml")
    before, _ = machine_of_run(run)
    assert before.links.inside.sustained == 5e7
    after, found = calibrated(run, before)
    assert [each.what.split()[0] for each in found] == ["throughput", "bandwidth"], found
    assert [each.factor for each in found] == pytest.approx([1 / 1.5, 1 / 3], rel=0.05)  # beside launches
    for name in ("products", "attention", "memory"):
        for key, figure in getattr(after, name).items():
            factor = 1 if (name, key) == ("products", "bf16") else 1 / 1.5
            assert figure.sustained == pytest.approx(getattr(before, name)[key].sustained * factor, rel=0.05)
    assert after.links.inside.sustained == pytest.approx(before.links.inside.sustained / 3, rel=0.05)
    assert (after.launch_s, after.links.between) == (before.launch_s, before.links.between)
    # what stragglers add to slower messages is computing, which was settled before
    assert ratio(run, before) > 1.5 and ratio(run, after) == pytest.approx(1, abs=0.03)


def test_the_link_of_a_pair_is_seen_where_only_pairs_send(tmp_path):
    text = (
        (ROOT / "mpitrain/jobs/machines/laptop.toml")
        .read_text()
        .replace("sustained = 4e9", "sustained = 5e7")
    )
    pair = 'pair = { peak = 4e9, sustained = 5e7, peak_source = "a", sustained_source = "b" }\n'
    pair += "pair_latency_s = 1e-5\n"
    (tmp_path / "paired.toml").write_text(text.replace("between = {", pair + "between = {"))
    run = ended((*NARROW, "parallel.tp=2"), {"tp": 3.0}, ranks=2, machine=tmp_path / "paired.toml")
    before, _ = machine_of_run(run)
    after, found = calibrated(run, before)
    assert "bandwidth of links inside pairs (tp)" in [each.what for each in found], found
    assert after.links.pair.sustained == pytest.approx(before.links.pair.sustained / 3, rel=0.05)
    assert after.links.inside == before.links.inside


def test_products_of_every_size_change_by_the_same_factor(tmp_path):
    text = (ROOT / "mpitrain/jobs/machines/laptop.toml").read_text()
    figure = 'peak = 100e9, sustained = {}, peak_source = "a", sustained_source = "b" }}'
    small, grouped = (
        f"fp32_{kind} = {{ {figure.format(rate)}" for kind, rate in (("small", "45e9"), ("grouped", "40e9"))
    )
    (tmp_path / "m.toml").write_text(text.replace("[products]", f"[products]\n{small}\n{grouped}"))
    run = ended(LARGE, {"computing": 1.5}, ranks=1, machine=tmp_path / "m.toml")
    before, _ = machine_of_run(run)
    after, _ = calibrated(run, before)
    for name in ("fp32", "fp32_small", "fp32_grouped"):
        assert after.products[name].sustained == pytest.approx(
            before.products[name].sustained / 1.5, rel=0.05
        )
    tiles = [machine_of(each).tiles["fp32"].rows for each in (before, after)]
    assert tiles[0] > 20 and tiles[1] == pytest.approx(tiles[0], rel=0.01)
    assert ratio(run, after) == pytest.approx(1, abs=0.01)


def test_what_is_faster_than_its_sheet_raises_the_peak():
    run = ended(LARGE, {"computing": 0.2}, ranks=1)
    after, _ = calibrated(run, machine_of_run(run)[0])
    figure = after.products["fp32"]
    assert figure.sustained == figure.peak > 100e9 and figure.peak_source == "as calibrated"


def test_launches_are_separate_from_throughput_or_nothing_is():
    run = ended((*SMALL, "model.width=8", "model.ffn=8", "model.heads=1"), {"computing": 2.0}, ranks=1)
    before, _ = machine_of_run(run)
    launches = before.launch_s
    for launch_s, what in ((1000 * launches, "launches"), (0.0, "throughput"), (launches / 30, None)):
        tried = _with_launches(before, launch_s)
        took = 2 * predicted_terms(run, machine_of(tried))["computing"]
        after, (found, *_) = calibrated(run._replace(step_s=took), tried)
        if what is None:
            share = 1 - predicted_terms(run, machine_of(_with_launches(before, 0.0)))["computing"] / (
                took / 2
            )
            assert 0.2 < share < 0.8 and "which one number can't separate" in found.why and after == tried
        else:
            assert found.what.startswith(what) and found.factor == pytest.approx(0.5, rel=0.02)
            assert (after.launch_s == tried.launch_s) == (what == "throughput")
            assert (after.products == tried.products) == (what == "launches")


def _with_launches(machine, launch_s):
    return msgspec.structs.replace(machine, launch_s=launch_s)


def test_a_part_that_is_small_or_that_no_link_explains_changes_nothing():
    run = ended(LARGE, {"computing": 1.0})
    machine, _ = machine_of_run(run)
    after, found = calibrated(run, machine)
    assert after == machine
    assert found[0].why == "as predicted" and found[1].why.endswith("less than 10%")
    usages = [{"dp": AxisUsage(1, 0, COUNTED * 100 * run.step_s)}] * 4
    waited = run._replace(step_s=101 * run.step_s, usages=usages)
    after, found = calibrated(waited, machine)
    assert after.links == machine.links and "no factor up to 10" in found[1].why


def test_the_file_keeps_what_was_before(tmp_path):
    path = str(tmp_path / "m.toml")
    run = ended(LARGE, {"computing": 1.5}, ranks=1)
    said = calibrate(run, CalibrationFile.require(path, ""), DAY)
    assert said.startswith(f'calibrated {path}, starting from the figures of profile "laptop"'), said
    first = read_machine(path)
    again = ended(LARGE, {"computing": 0.8}, ranks=1, machine=path)
    assert ratio(run, first) == pytest.approx(1, abs=0.01)
    said = calibrate(again, CalibrationFile.require(path, path), DAY)
    assert said.startswith(f"calibrated {path}:"), said
    second = read_machine(path)
    assert second.products["fp32"].sustained == pytest.approx(60e9 / 1.5 / 0.8, rel=0.02)
    assert second.products["fp32"].sustained_source == (
        "estimate: BLAS on one core; calibrated 2026-11-26, a run of quickstart on 1 rank"
    )
    log = [line for line in (tmp_path / "m.toml").read_text().splitlines() if "products.fp32" in line]
    assert log[0].startswith(
        "# 2026-11-26, a run of quickstart on 1 rank: products.fp32.sustained was 6e+10 ("
    )
    assert float(log[1].split(" was ")[1].split()[0]) == pytest.approx(40e9, rel=0.02)
    assert calibrate(run._replace(num_steps=0), CalibrationFile(path, True), DAY).endswith(
        "nothing was written"
    )
    assert read_machine(path) == second


def test_a_new_file_is_begun_whatever_a_run_can_tell(tmp_path):
    """Or the next command of the page has no machine; a file that is there stays as it is."""
    path = str(tmp_path / "m.toml")
    run = ended(LARGE, {"computing": 1.0}, ranks=1)
    said = calibrate(run, CalibrationFile.require(path, ""), DAY)
    assert said.startswith(f'--calibrate: {path} begins with the figures of profile "laptop"'), said
    assert said.endswith("computing: as before, as predicted")
    again = ended(LARGE, {"computing": 1.0}, ranks=1, machine=path)
    before = (tmp_path / "m.toml").read_text()
    assert calibrate(again, CalibrationFile.require(path, path), DAY).startswith(
        "--calibrate: nothing was written"
    )
    assert ratio(run, read_machine(path)) == pytest.approx(1) and (tmp_path / "m.toml").read_text() == before


def test_a_file_that_is_not_the_runs_own_is_refused(tmp_path):
    path = tmp_path / "m.toml"
    with pytest.raises(ConfigError, match=r"needed one that ends with \.toml"):
        CalibrationFile.require("h100-80gb", "h100-80gb")
    with pytest.raises(ConfigError, match="its folder can't be written"):
        CalibrationFile.require(str(tmp_path / "no" / "m.toml"), "")
    path.write_text("")
    with pytest.raises(ConfigError, match=r"doesn't predict this run; set run.machine to it"):
        CalibrationFile.require(str(path), "laptop")
    assert CalibrationFile.require(str(path), str(path)).exists
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="read-only"):
        CalibrationFile.require(str(path), str(path))
    path.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(ConfigError, match="no file of your own"):
            CalibrationFile.require(str(path), str(path))


def test_a_run_writes_a_file_that_predicts_the_next(tmp_path):
    path = str(tmp_path / "m.toml")
    words = ["run", *(f"--set={key}" for key in (*SMALL, "run.steps=4", "run.eval_batches=1"))]
    first, refused, dry = run_commands(
        2,
        [*words, f"--set=run.dir={tmp_path / 'one'}", "--calibrate", path],
        [*words, f"--set=run.dir={tmp_path / 'two'}", "--calibrate", str(tmp_path / "no" / "m.toml")],
        [*words, f"--set=run.dir={tmp_path / 'three'}", "--calibrate", path, "--dry-run"],
    )
    assert first.returncode == 0, tail(first.output)
    begun = f"calibrated {path}, starting from", f"--calibrate: {path} begins with"  # launches are 20 to 80 %
    assert any(each in first.output for each in begun)
    assert find_machine(path).name.endswith(", calibrated")
    assert refused.returncode == 2 and refused.output.count("its folder can't be written") == 1
    assert dry.returncode == 2 and "--calibrate does nothing with --dry-run" in dry.output
