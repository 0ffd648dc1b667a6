"""A loss far above those before is counted, left out, or undone with the data that led to it.

A run that resumes decides alike.
"""

import json
import math
import shutil
from pathlib import Path

import loss_spikes
import numpy as np
import pytest
from conftest import LONG
from launch import lines_in, loss_lines, run_commands, tail, tiny, write_text

from mpitrain.config import SpikesTable as Settings
from mpitrain.training.checks.spikes import Spikes

KEYS = dict(run_steps=28, run_save_every=8, run_eval_every=100, schedule_name="constant", optimizer_lr=0.01)
KEYS |= dict(spikes_window=16, spikes_threshold=5.0)
NOISE = {"NOISE": "[20]"}


def test_a_spike_is_a_loss_far_above_the_median_once_enough_are_known():
    spikes = Spikes(Settings(do="skip", window=8, threshold=5.0))
    for step, loss in enumerate((4.0, 3.9, 3.8)):
        assert spikes.observe(step, loss) == "" and spikes.limit == math.inf
    spikes.observe(4, 3.7)
    assert 3.85 < spikes.limit < 5 and spikes.skip_update(5.0) and not spikes.skip_update(3.9)
    assert "left out" in spikes.observe(5, 9.0) and len(spikes.state["losses"]) == 4
    assert not spikes.skip_update(math.nan)


def test_flat_losses_have_a_margin_and_counting_leaves_nothing_out():
    spikes = Spikes(Settings(do="count", window=4, threshold=10.0))
    for step in range(4):
        spikes.observe(step, 2.0)
    assert (
        spikes.limit == pytest.approx(2.2)
        and "counted only" in spikes.observe(5, 2.3)
        and not spikes.skip_update(9.0)
    )


def test_what_a_checkpoint_holds_brings_back_the_same_decisions():
    spikes = Spikes(Settings(do="rollback", window=8))
    for step, loss in enumerate((4.0, 3.9, 3.8, 3.7, 3.5)):
        spikes.observe(step, loss)
    spikes.rolled_back(21, 16, {"rollbacks": 1, "batches_skipped": 3})
    again = Spikes(Settings(do="rollback", window=8))
    again.state = json.loads(json.dumps(spikes.state))
    assert (again.limit, again.rollbacks, again.batches_skipped) == (spikes.limit, 2, 8)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("spikes") / "text.txt", 60_000)


def train(text, runs):
    """Train each run to its end, or resume; return their output by name.

    Batch 20, which step 21 reads, is noise.
    """
    commands = [("run", *tiny(path, text, **KEYS, spikes_do=do)) for do, path in runs.items()]
    done = run_commands(2, *commands, program=Path(loss_spikes.__file__), env=NOISE)
    assert all(each.returncode == 0 for each in done), tail(done[0].output + done[1].output)
    return {do: each.output for do, each in zip(runs, done, strict=True)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """Run directories of runs that met the noise, and what they said, by name."""
    folder = tmp_path_factory.mktemp("whole")
    runs = {do: folder / do for do in ("skip", "rollback")}
    return runs, train(text, runs)


def lines_of(runs):
    return {do: loss_lines(path) for do, path in runs.items()}


def test_spikes_are_left_out_or_undone(whole):
    runs, said = whole
    assert all("step 21 is a spike" in output for output in said.values()), tail(said["skip"])
    undone = "rolled back to step 16, rollback 1; 5 batches are not read again"
    assert undone in said["rollback"], tail(said["rollback"])
    assert all(lines_in(path) == 28 for path in runs.values())
    # the first is of step 0
    skip, rollback = lines_of(runs).values()
    assert skip[:17] == rollback[:17] and skip[17:] != rollback[17:]


# 24 is after the spike: it knows of the update left out, or of the data
@LONG
@pytest.mark.parametrize(("step", "later"), [(16, (24, 28)), (24, (28,))])
def test_a_run_that_resumes_decides_alike(tmp_path, text, whole, step, later):
    runs = {do: tmp_path / do for do in whole[0]}
    for do, path in runs.items():
        shutil.copytree(whole[0][do], path)
        for each in later:
            shutil.rmtree(path / "checkpoints" / f"step-{each:08d}")
    said = train(text, runs)
    assert all(f"resuming after step {step}" in output for output in said.values()), tail(said["skip"])
    assert lines_of(runs) == lines_of(whole[0])


@LONG
def test_a_step_that_is_undone_may_have_no_finite_gradients_besides(tmp_path, text, whole):
    overflow = ("run", *tiny(tmp_path / "overflow", text, **KEYS, spikes_do="rollback"))
    (done,) = run_commands(2, overflow, program=Path(loss_spikes.__file__), env=NOISE | {"OVERFLOW": "21"})
    assert "rolled back to step 16" in done.output, tail(done.output)
    assert loss_lines(tmp_path / "overflow") == loss_lines(whole[0]["rollback"]), tail(done.output)


@LONG
def test_routing_is_recorded_of_the_steps_that_were_not_undone(tmp_path, text):
    """Replayed, it makes the same steps after the rollback."""
    keys = dict(
        KEYS,
        run_steps=14,
        run_save_every=4,
        spikes_window=4,
        spikes_do="rollback",
        model_family="mixtral",
        spikes_threshold=3.0,
        experts_count=4,
    )
    recorded = tmp_path / "recorded"
    replayed = tmp_path / "replayed"
    first = ("run", *tiny(recorded, text, **keys, run_routing=14))
    again = ("run", *tiny(replayed, text, **keys, experts_replay=recorded / "routing.npz"))
    done = run_commands(1, first, again, program=Path(loss_spikes.__file__), env={"NOISE": "[10]"})
    assert [each.returncode for each in done] == [0, 0], tail(done[0].output + done[1].output)
    assert all("rolled back to step 8, rollback 1" in each.output for each in done), tail(done[0].output)
    assert (
        "recorded the routing of steps 1 to 14" in done[0].output
        and "experts.replay has steps" not in done[1].output
    )
    found = np.load(recorded / "routing.npz")
    assert found["first_step"] == 1 and {
        len(found[name]) for name in found.files if name != "first_step"
    } == {14}
    assert loss_lines(replayed) == loss_lines(recorded)


@LONG
def test_a_rollback_goes_to_a_step_that_a_run_which_never_left_has_too_and_that_is_whole(tmp_path, text):
    """Of runs that left after step 19, with a checkpoint.

    16 is the newest that run.save_every asks for, and run.keep doesn't remove it.
    """
    keys = KEYS | dict(spikes_do="rollback")
    noise = {"NOISE": "[20]"}
    whole, left, damaged, lost = (tmp_path / name for name in ("whole", "left", "damaged", "lost"))
    run = {
        path: ("run", *tiny(path, text, **keys, run_keep=1, run_trace=1)) for path in (left, damaged, lost)
    }
    run[whole] = "run", *tiny(whole, text, **keys, run_trace=22)
    first = run_commands(
        2, run[whole], (*run[left], "--set", "run.steps=19"), program=Path(loss_spikes.__file__), env=noise
    )
    assert [each.returncode for each in first] == [0, 0], tail(first[0].output + first[1].output)
    for path in (damaged, lost):
        alter(shutil.copytree(left, path), 16)
    shutil.copytree(whole / "checkpoints" / "step-00000008", damaged / "checkpoints" / "step-00000008")
    here, there, nowhere = run_commands(
        2, run[left], run[damaged], run[lost], program=Path(loss_spikes.__file__), env=noise
    )
    assert "resuming after step 19" in here.output, tail(here.output)
    assert "rolled back to step 16" in here.output, tail(here.output)
    assert loss_lines(left) == loss_lines(whole), tail(here.output)
    assert first[0].output.count("traced 22 steps") == here.output.count("traced 1 step") == 1, tail(
        here.output
    )
    events = json.loads((whole / "trace.json").read_text())["traceEvents"]
    traced = [event["args"]["step"] for event in events if event["name"] == "F0@0" and event["pid"] == 0]
    assert traced == list(range(2, 24)), "a step that was computed again is there twice"
    assert "step-00000016: shard-0000" in there.output, tail(there.output)
    assert "using step-00000008" in there.output, tail(there.output)
    assert "rolled back to step 8, rollback 1; 13 batches are not read again" in there.output, tail(
        there.output
    )
    assert nowhere.returncode == 1, tail(nowhere.output)
    assert "no checkpoint can be used: step-00000016" in nowhere.output, tail(nowhere.output)


def alter(run_dir, step):
    path = run_dir / "checkpoints" / f"step-{step:08d}" / "shard-00000.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@LONG
def test_too_many_spikes_end_a_run_and_the_last_step_is_not_saved(tmp_path, text):
    """A run that resumes knows how many were skipped in a row before."""
    rollback = dict(KEYS, run_save_every=20, spikes_do="rollback", spikes_most=1)
    # 23 is the third in a row
    skip = dict(KEYS, run_save_every=1, spikes_do="skip", run_max_skips=3)
    runs = (("run", *tiny(tmp_path / keys["spikes_do"], text, **keys)) for keys in (rollback, skip, skip))
    noise = {"NOISE": json.dumps(list(range(20, 40)))}
    rolled, skipped, again = run_commands(2, *runs, program=Path(loss_spikes.__file__), env=noise)
    assert "diverged: 1 rollback was not enough (spikes.most = 1)" in rolled.output, tail(rolled.output)
    for each in (skipped, again):
        assert "diverged: 3 steps were skipped in a row (run.max_skips = 3)" in each.output, tail(each.output)
    assert rolled.returncode == skipped.returncode == again.returncode == 1
    assert "resuming after step 22" in again.output, tail(again.output)
    assert "step 24 " not in again.output, tail(again.output)
    assert max(path.name for path in (tmp_path / "skip" / "checkpoints").glob("step-*")) == "step-00000022"


@LONG
def test_a_rollback_goes_to_what_this_run_went_on_from_not_to_what_it_refused(tmp_path, text):
    run = ("run", *tiny(tmp_path / "run", text, **KEYS, spikes_do="rollback"))
    (done,) = run_commands(1, run, program=Path(loss_spikes.__file__), env={"NOISE": "[]"})
    assert done.returncode == 0, tail(done.output)
    for step in (24, 28):
        alter(tmp_path / "run", step)
    (done,) = run_commands(1, run, program=Path(loss_spikes.__file__), env={"NOISE": "[20]"})
    assert "using step-00000016" in done.output, tail(done.output)
    assert "step 21 is a spike" in done.output, tail(done.output)
    assert "rolled back to step 16, rollback 1; 5 batches are not read again" in done.output, tail(
        done.output
    )
    assert done.returncode == 0 and done.output.count("rolled back") == 1, tail(done.output)
