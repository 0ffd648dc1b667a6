"""Saving beside the steps: the same bits as standing still, losses told, disks that fail or hang named."""

import json
import os
import re
import shutil

import pytest
from checkpoints import digest_of
from conftest import LONG
from launch import MPITRAIN, loss_lines, mpirun, planted, run_several, run_tiny, short, tail, tiny, write_text

from mpitrain.checkpoint.load import open_step, steps
from mpitrain.cluster.status_board import RankStatus
from mpitrain.training.saving.saver import Saver

SETTINGS = dict(run_steps=12, run_save_every=2, run_eval_every=2, schedule_name="constant")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("saving") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    """Runs on two ranks, each with a stage."""
    folder = tmp_path_factory.mktemp("saving")
    (folder / "staging").mkdir()
    runs = {
        "background": {},
        "blocking": {"run_save": "blocking"},
        "together": {"run_shards": "node", "run_steps": 4},
        "one file": {"run_shards": "one", "run_save": "blocking", "run_steps": 4},
        "kept": {"run_keep": 2, "run_keep_every": 4, "run_keep_best": 1},
        "staged": {"run_staging": folder / "staging", "run_steps": 4},
    }
    run_several(
        2, text, {folder / name: {**SETTINGS, "parallel_pp": 2, **changes} for name, changes in runs.items()}
    )
    return folder


def digests(run_dir):
    return {step: digest_of(run_dir / "checkpoints", step) for step in steps(run_dir / "checkpoints")}


def saves_by_line(run_dir):
    """Return what metrics.jsonl tells of saves: {the step of the line: saves}."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["saves"] for line in lines if "saves" in line}


def test_a_save_in_the_background_has_the_bits_of_its_own_step(folder):
    """Training went on meanwhile: had it been read from the weights themselves, it would have later ones."""
    assert loss_lines(folder / "background") == loss_lines(folder / "blocking")
    assert digests(folder / "background") == digests(folder / "blocking")
    assert list(digests(folder / "blocking")) == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(("name", "untold"), [("background", {10, 12}), ("blocking", {12})])
def test_a_save_is_recorded_in_a_later_line_if_there_is_one(folder, name, untold):
    """In the background that of step 10 may still have been under way when the line of step 12 was
    written.
    """
    found = [(save["step"], line) for line, saves in saves_by_line(folder / name).items() for save in saves]
    assert {2, 4, 6, 8, 10, 12} - untold <= {step for step, _ in found} and all(
        step < line <= step + 4 for step, line in found
    )
    for saves in saves_by_line(folder / name).values():
        for save in saves:
            assert 0 <= save["stall_s"] <= save["took_s"] and "not_saved" not in save


def test_a_run_keeps_what_it_was_asked_to(folder):
    losses = {
        line["step"]: line["val_loss"]
        for line in map(json.loads, loss_lines(folder / "kept"))
        if line.get("val_loss")
    }
    best = min((step for step in losses if step), key=losses.get)
    assert steps(folder / "kept" / "checkpoints") == sorted({4, 8, 10, 12, best})


def test_a_run_that_was_killed_after_its_last_save_removes_the_rest_on_the_next_start(folder, tmp_path, text):
    run_dir = shutil.copytree(folder / "kept", tmp_path / "run")
    checkpoints = run_dir / "checkpoints"
    left = steps(checkpoints)
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000006.gone")
    shutil.copytree(folder / "background" / "checkpoints" / "step-00000002", checkpoints / "step-00000002")
    (checkpoints / "step-00000012.tmp").mkdir()
    kept = dict(run_keep=2, run_keep_every=4, run_keep_best=1, parallel_pp=2)
    done = run_tiny(2, run_dir, text, **SETTINGS | kept)
    assert done.returncode == 0 and "nothing is left to do" in done.output, tail(done.output)
    assert steps(checkpoints) == left and not list(checkpoints.glob("*.*"))


def test_what_is_staged_on_the_node_arrives_and_leaves_nothing_there(folder):
    assert digests(folder / "staged") == {step: digests(folder / "blocking")[step] for step in (2, 4)}
    assert list((folder / "staging").iterdir()) == []


@pytest.mark.parametrize("name", ["together", "one file"])
def test_ranks_that_save_into_one_file_save_the_same(folder, name):
    assert digests(folder / name) == {step: digests(folder / "blocking")[step] for step in (2, 4)}
    files = sorted(path.name for path in (folder / name / "checkpoints" / "step-00000004").iterdir())
    assert files == ["index.h5", "index.xxh3", "shard-00000.h5"]
    with open_step(folder / name / "checkpoints", 4) as saved:
        assert {len(saved.array(array).pieces) for array in saved.names()} == {1}


def test_damage_that_one_rank_finds_is_reported_once_and_all_resume_from_the_step_before(
    folder, tmp_path, text
):
    run_dir = shutil.copytree(folder / "staged", tmp_path / "run")
    shard = run_dir / "checkpoints" / "step-00000004" / "shard-00001.h5"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = run_tiny(2, run_dir, text, **SETTINGS | {"run_steps": 4, "parallel_pp": 2})
    assert done.returncode == 0, tail(done.output)
    assert re.findall(r"step-\d+: shard-\d+\.h5: chunk \d+ of .* is damaged", done.output)[1:] == []
    assert done.output.count("is damaged") == done.output.count("using step-00000002") == 1
    assert loss_lines(run_dir) == loss_lines(folder / "staged") and digests(run_dir) == digests(
        folder / "staged"
    )


def test_a_step_that_was_found_damaged_takes_no_place_of_those_that_are_kept(folder, tmp_path, text):
    run_dir = shutil.copytree(folder / "background", tmp_path / "run")
    shard = run_dir / "checkpoints" / "step-00000012" / "shard-00000.h5"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = run_tiny(
        2, run_dir, text, **SETTINGS | dict(run_steps=13, run_save_every=0, run_keep=2, parallel_pp=2)
    )
    assert done.returncode == 0 and "using step-00000010" in done.output, tail(done.output)
    assert steps(run_dir / "checkpoints") == [10, 12, 13]


NOTED = """
import os, sys
fsync = os.fsync

def note(what, path):
    os.write(2, f"{what} {os.path.basename(path)}\\n".encode())

def noted(descriptor):
    fsync(descriptor)
    note("synced", os.readlink(f"/proc/self/fd/{descriptor}"))

os.fsync = noted
sys.addaudithook(lambda event, given: note("renamed", given[0]) if event == "os.rename" else None)
"""


@pytest.mark.parametrize("save", ["background", pytest.param("blocking", marks=LONG)])
def test_the_lines_up_to_a_step_are_on_disk_when_it_is_saved(tmp_path, text, save):
    """After a power cut nothing makes them again. All that is synced or renamed is noted, in its order."""
    (tmp_path / "sitecustomize.py").write_text(NOTED)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "PLANTED": "{}"}  # else tests/support/preload.py doesn't import it
    done = run_tiny(1, tmp_path / "run", text, **SETTINGS | {"run_steps": 4, "run_save": save}, env=env)
    noted = re.findall(
        r"(?:synced|renamed) (?:metrics\.jsonl|step-0000000.\.tmp)$", done.output, re.MULTILINE
    )
    each = [
        ("synced metrics.jsonl", f"synced step-0000000{step}.tmp", f"renamed step-0000000{step}.tmp")
        for step in (2, 4)
    ]
    assert done.returncode == 0 and noted == [*each[0], *each[1]], tail(done.output)


def test_a_staging_directory_that_is_not_there_is_bad_input(tmp_path, text):
    done = run_tiny(2, tmp_path / "run", text, run_staging=tmp_path / "nowhere")
    assert done.returncode == 2, tail(done.output)
    assert done.output.count("ConfigError: run.staging = ") == 1, tail(done.output)
    assert "no such directory on" in done.output and not (tmp_path / "run").exists()


def test_a_last_step_that_is_not_worth_saving_ends_a_run_as_diverged(tmp_path, text):
    """Step 2 was still being saved when step 3 turned out so.

    Its own outcome came later, and hid that of the last step.
    """
    wild = dict(
        optimizer_name="sgd", optimizer_momentum=0.0, optimizer_clip=0, optimizer_lr=1e5, schedule_warmup=0
    )
    done = run_tiny(1, tmp_path / "run", text, **SETTINGS | wild | dict(run_steps=3, run_eval_every=0))
    reason = "its loss or its gradients are not finite"
    assert f"step 3 is not saved: {reason}; the newest checkpoint is of step 2" in done.output, tail(
        done.output
    )
    assert done.returncode == 1 and f"diverged: {reason}" in done.output, tail(done.output)
    assert steps(tmp_path / "run" / "checkpoints") == [2]


# ---------------------------------------------------------------- a disk that fails


def test_a_save_that_fails_is_reported_and_training_continues(tmp_path, text):
    """Of rank 1, which writes nothing but its shard: from the second save on no file can grow there."""
    run_dir = tmp_path / "run"
    env = planted({"rank": 1, "phase": "saving", "call": 4000, "fault": "full disk"})
    done = run_tiny(2, run_dir, text, **SETTINGS, parallel_pp=2, env=env)
    assert "planted full disk" in done.output, "no such call"
    said = re.findall(
        r"step (\d+) is not saved: rank 1: (.*); the newest checkpoint is of step (\d+)", done.output
    )
    first = int(said[0][0])
    assert [int(step) for step, _, _ in said] == list(range(first, 13, 2)), tail(done.output)
    assert first > 2, tail(done.output)
    assert all(
        re.search("No space left on device|File too large", reason) and newest == str(first - 2)
        for _, reason, newest in said
    )
    assert done.returncode == 1 and "step 12 could not be saved" in done.output, tail(done.output)
    assert list(digests(run_dir)) == list(range(2, first, 2)) and len(loss_lines(run_dir)) == 13
    assert not list((run_dir / "checkpoints").glob("*.tmp"))
    assert "rank 1: " in json.dumps(saves_by_line(run_dir))
    done = run_tiny(2, run_dir, text, **SETTINGS, parallel_pp=2)  # there is room again
    assert done.returncode == 0, tail(done.output)
    assert f"resuming after step {first - 2}" in done.output, tail(done.output)
    assert list(digests(run_dir)) == [2, 4, 6, 8, 10, 12]


@LONG
def test_a_disk_that_hangs_is_named_by_whoever_waits_for_it(tmp_path, text):
    run_dir = tmp_path / "run"
    env = planted({"rank": 1, "phase": "saving", "call": 2000, "fault": "slow"})
    done = mpirun(
        2,
        MPITRAIN,
        "run",
        *tiny(run_dir, text, **SETTINGS, parallel_pp=2, comm_timeout_s=short(4)),
        env=env,
        timeout=60,
    )
    assert "planted slow" in done.output and done.returncode == 1, tail(done.output)
    named = r"rank 1 \(.* in phase save, waiting until step \d+ is saved, meanwhile .*(: stuck|,) for \d+ s"
    assert re.search(named, done.output), tail(done.output)


def test_a_disk_may_take_longer_for_a_sync_than_a_step_takes():
    saver = Saver.__new__(Saver)
    place = RankStatus(0, "rank 0", 60.0)
    saver._place = place
    saver._patience_s = 600.0
    with saver.patiently():
        assert place.read().limit_s == 600
    assert place.read().limit_s == 60
