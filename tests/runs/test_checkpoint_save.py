"""Saving: all or nothing, whatever the writers send, the disk does or the scheduler kills."""

import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from checkpoints import killed_at, meta_of
from conftest import LONG, WITH_LONG
from folders import SUPPORT

from mpitrain.checkpoint.boxes import run_boxes
from mpitrain.checkpoint.files import drain
from mpitrain.checkpoint.folders import discard, publish
from mpitrain.checkpoint.load import open_latest, steps
from mpitrain.checkpoint.save import Extent, begin, commit, write_shard
from mpitrain.errors import CheckpointError

SAVER = """
import sys
from pathlib import Path
import numpy as np
from checkpoints import killed_at, meta_of
from mpitrain.checkpoint.save import begin, commit, write_shard

for step in range(1, 1000):
    for life in (1, 2):  # every step is saved twice, as after a resume
        tmp = begin(Path(sys.argv[1]), step)
        for writer in range(2):
            write_shard(tmp, writer, {f"parameters/{writer}": np.full(50_000, step, np.float32)})
        commit(tmp, meta_of(step) | {"life": life}, num_shards=2)
        print(step, flush=True)
"""


def save(folder, step, value=0.0, num_shards=2):
    tmp = begin(folder, step)
    for writer in range(num_shards):
        write_shard(tmp, writer, {f"parameters/{writer}": np.full(1000, value)})
    return commit(tmp, meta_of(step) | {"value": value}, num_shards=num_shards)


def newest(folder):
    """Return step and value of the newest checkpoint; nothing may have to be refused on the way."""
    with open_latest(folder, warn=pytest.fail) as checkpoint:
        assert (checkpoint.read("parameters/0") == checkpoint.meta["value"]).all()
        return checkpoint.step, checkpoint.meta["value"]


# ---------------------------------------------------------------- what writers send


def commit_rows(folder, parts, rows=8, dtypes=("f4", "f4")):
    tmp = begin(folder, 30)
    for writer, (start, stop) in enumerate(parts):
        array = np.zeros((stop - start, 3), dtypes[writer])
        write_shard(tmp, writer, {"parameters/w": [(array, Extent((rows, 3), (start, 0)))]})
    return commit(tmp, meta_of(30))


def test_gap_between_shards_is_refused(tmp_path):
    save(tmp_path, 20)
    with pytest.raises(
        CheckpointError,
        match=r"parameters/w \[8, 3\]: the shards hold 18 of 24 elements \(shard-00000.h5 \[0:4, 0:3\]",
    ):
        commit_rows(tmp_path, [(0, 4), (6, 8)])
    assert newest(tmp_path) == (20, 0.0)


def test_overlap_of_shards_is_refused(tmp_path):
    save(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"shard-00000.h5 and shard-00001.h5 both hold \[4:5, 0:3\]"):
        commit_rows(tmp_path, [(0, 5), (4, 8)])
    assert newest(tmp_path) == (20, 0.0)


def test_gap_and_overlap_of_equal_size_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="both hold"):
        commit_rows(tmp_path, [(0, 4), (0, 4)])


@pytest.mark.parametrize(("stop", "message"), [(7, r"both hold \[2:3, 0:1\]"), (5, "hold 23 of 24 elements")])
def test_runs_of_elements_must_tile_too(tmp_path, stop, message):
    array = np.zeros((8, 3))
    tmp = begin(tmp_path, 30)
    for writer, run in enumerate([(0, stop), (6, 24)]):
        boxes = [box for box, _ in run_boxes(array.shape, *run)]
        write_shard(
            tmp, writer, {"w": [(np.zeros(box.shape), Extent(array.shape, box.start)) for box in boxes]}
        )
    with pytest.raises(CheckpointError, match=message):
        commit(tmp, meta_of(30))


def test_overlap_within_one_writer_is_refused(tmp_path):
    tmp = begin(tmp_path, 30)
    write_shard(tmp, 0, {"w": [(np.zeros(3), Extent((5,), (0,))), (np.zeros(3), Extent((5,), (2,)))]})
    with pytest.raises(CheckpointError, match=r"shard-00000.h5 and shard-00000.h5 both hold \[2:3\]"):
        commit(tmp, meta_of(30))


def test_two_writers_of_one_scalar_are_refused(tmp_path):
    tmp = begin(tmp_path, 1)
    for writer in range(2):
        write_shard(tmp, writer, {"step": np.array(1.0)})
    with pytest.raises(CheckpointError, match="both hold"):
        commit(tmp, meta_of(1))


def test_different_dtypes_or_shapes_are_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"fp64 \[8, 3\] in shard-00001.h5, fp32 \[8, 3\] in shard-00000.h5"
    ):
        commit_rows(tmp_path, [(0, 4), (4, 8)], dtypes=("f4", "f8"))


def test_missing_or_torn_shard_is_refused_at_commit(tmp_path):
    tmp = begin(tmp_path, 30)
    with pytest.raises(CheckpointError, match="found 0 shards, at least 1 needed"):
        commit(tmp, meta_of(30))
    write_shard(tmp, 0, {"w": np.zeros(3)})
    with pytest.raises(CheckpointError, match="found 1 shard, 2 needed"):
        commit(tmp, meta_of(30), num_shards=2)
    (tmp / "shard-00001.h5").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"step-00000030\.tmp: shard-00001\.h5 cannot be read"):
        commit(tmp, meta_of(30), num_shards=2)
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"w": np.zeros(3, bool)}, "w has dtype |b1"),
        ({"w": np.zeros(3, ">f4")}, "w has dtype >f4"),
        ({"w": [(np.zeros(3), Extent((4,), (2,)))]}, "[3] at [2] is no box of [4]"),
        ({"w": [(np.zeros(3), Extent((4, 1), (0, 0)))]}, "[3] at [0, 0] is no box of [4, 1]"),
        ({"w": [(np.zeros(3), Extent((4,), (1,)))] * 2}, "w@1:4: writer 0 has it 2 times"),
        ({"w": [(np.zeros(3), Extent((4,), (1,)))], "w@1:4": np.zeros(3)}, "w@1:4: writer 0 has it 2 times"),
        (
            {"w": [(np.zeros(3), Extent((4,), (0,))), (np.zeros(1, "f4"), Extent((4,), (3,)))]},
            "w: parts of writer 0 differ in dtype",
        ),
        (
            {"w": [(np.zeros(3), Extent((4,), (0,))), (np.zeros(1), Extent((5,), (3,)))]},
            "w: parts of writer 0 differ in dtype or whole",
        ),
        ({"checkpoint/w": np.zeros(3)}, "use another one"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, arrays, message):
    with pytest.raises(CheckpointError) as caught:
        write_shard(begin(tmp_path, 1), 0, arrays)
    assert message in str(caught.value)
    assert list(tmp_path.glob("*/*")) == []


def test_a_writer_may_have_nothing_to_write(tmp_path):
    tmp = begin(tmp_path, 1)
    write_shard(tmp, 0, {"w": np.zeros(3)})
    write_shard(tmp, 1, {})
    commit(tmp, meta_of(1), num_shards=2)
    with open_latest(tmp_path, warn=pytest.fail) as checkpoint:
        assert checkpoint.names() == ["w"]


# ---------------------------------------------------------------- what is there already


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 30, 1.0, num_shards=3)
    save(tmp_path, 30, 2.0, num_shards=2)
    assert newest(tmp_path) == (30, 2.0)
    assert os.listdir(tmp_path) == ["step-00000030"]


def test_saving_a_damaged_step_again_heals_it(tmp_path):
    (save(tmp_path, 30, 1.0) / "index.h5").unlink()
    save(tmp_path, 30, 2.0)
    assert newest(tmp_path) == (30, 2.0)


def test_leftovers_are_removed_at_the_next_save(tmp_path):
    write_shard(begin(tmp_path, 40), 0, {"w": np.zeros(3)})
    save(tmp_path, 50)
    assert os.listdir(tmp_path) == ["step-00000050"]


def test_a_replaced_step_is_found_when_the_new_one_never_came(tmp_path):
    save(tmp_path, 20, 1.0)
    save(tmp_path, 30, 2.0).rename(tmp_path / "step-00000030.old")
    assert newest(tmp_path) == (30, 2.0)
    save(tmp_path, 40, 3.0)
    assert steps(tmp_path) == [20, 30, 40]
    save(tmp_path, 30, 4.0)
    assert sorted(os.listdir(tmp_path)) == ["step-00000020", "step-00000030", "step-00000040"]


# ---------------------------------------------------------------- what the system refuses


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        begin(tmp_path / "file" / "checkpoints", 30)
    assert f"{tmp_path}/file/checkpoints: checkpoint cannot be written: Not a directory; " in str(
        caught.value
    )


def test_unreadable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot be read: file is a file, needed a folder"):
        open_latest(tmp_path / "file")


def test_full_disk_is_an_error_and_not_a_crash(tmp_path):
    save(tmp_path, 20, 1.0)
    tmp = begin(tmp_path, 30)
    with pytest.raises(CheckpointError) as caught, files_of_at_most(1000):
        write_shard(tmp, 0, {"w": np.zeros(100_000)})
    assert f"{tmp_path}: checkpoint cannot be written: File too large; free some space" in str(caught.value)
    assert newest(tmp_path) == (20, 1.0)


def test_too_little_space_is_reported_before_anything_is_written(tmp_path):
    save(tmp_path, 20, 1.0)
    with pytest.raises(
        CheckpointError,
        match=r"cannot be written: 9,000,000,000,000.000 GB are needed, [0-9.,]+ GB are free; free some",
    ):
        begin(tmp_path, 30, num_bytes=9 * 10**21)
    assert os.listdir(tmp_path) == ["step-00000020"]


@contextmanager
def files_of_at_most(size):
    """Limit the size of files: as good as a full disk, at any byte.

    Over before pytest writes its own output, perhaps to a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1000, 3000, 20_000, 100_000])
@pytest.mark.parametrize("call", ["write_shard", "commit"])
def test_disk_may_become_full_at_any_byte(tmp_path, call, size):
    # shard and index are larger than any of the limits
    arrays = {f"parameters/{i}": np.zeros((100, 10)) for i in range(300)}
    save(tmp_path, 20, 1.0)
    tmp = begin(tmp_path, 20)
    if call == "commit":
        write_shard(tmp, 0, arrays)
    with pytest.raises(CheckpointError, match="File too large"), files_of_at_most(size):
        write_shard(tmp, 0, arrays) if call == "write_shard" else commit(tmp, meta_of(20))
    assert newest(tmp_path) == (20, 1.0)


# ---------------------------------------------------------------- kill -9


@pytest.mark.parametrize("step", [30, pytest.param(40, marks=LONG)], ids=["replaces", "is new"])
def test_killed_at_every_call_leaves_the_old_state_or_the_new(tmp_path, step):
    events = 0
    states = []
    while True:
        folder = tmp_path / str(events)
        save(folder, 20, 1.0)
        save(folder, 30, 2.0)
        if not killed_at(events, lambda: save(folder, step, 3.0)):  # noqa: B023  (called at once)
            break
        states.append(newest(folder))
        save(folder, 50, 4.0)  # the next start resumes from there
        assert newest(folder) == (50, 4.0) and steps(folder)[:2] == [20, 30]
        events += 1 if WITH_LONG else 3
    assert events > 10 and set(states) <= {(30, 2.0), (step, 3.0)} and states[0] == (30, 2.0)
    assert newest(folder) == (step, 3.0)


def test_killed_at_random_moments_leaves_what_was_committed(tmp_path):
    delays = np.random.default_rng(1).uniform(0.0, 0.25, 8 if WITH_LONG else 3)
    for life, delay in enumerate(delays):
        folder = tmp_path / str(life)
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, folder], stdout=subprocess.PIPE, text=True, cwd=SUPPORT
        )
        first = saver.stdout.readline()
        time.sleep(delay)
        saver.kill()
        committed = int((first + saver.communicate()[0]).split()[-1])
        with open_latest(folder, warn=pytest.fail) as checkpoint:
            assert checkpoint.step in (committed, committed + 1)
            assert (checkpoint.read("parameters/1") == checkpoint.step).all()


def test_nothing_is_left_of_a_staged_save_that_fails_and_no_link_there_is_followed(tmp_path):
    victim = tmp_path / "victim"
    staging = tmp_path / "stage" / "s.h5"
    tmp = begin(tmp_path / "run", 10)
    staging.parent.mkdir()
    victim.write_text("mine")
    staging.symlink_to(victim)
    array = {"w": np.zeros((10, 10), np.float32)}
    write_shard(tmp, 0, array, staging=staging)
    assert (
        victim.read_text() == "mine"
        and (tmp / "shard-00000.h5").stat().st_size > 400
        and not list(staging.parent.iterdir())
    )
    (tmp / "shard-00001.h5").symlink_to(victim)
    with pytest.raises(
        CheckpointError, match=r"run: checkpoint cannot be written: it is a symbolic link.* change run\.dir"
    ):
        write_shard(tmp, 1, array, staging=staging)
    assert victim.read_text() == "mine" and not list(staging.parent.iterdir())


@pytest.mark.parametrize("what", ["checkpoints", "step-00000010.tmp"])
def test_a_folder_that_becomes_a_link_while_a_step_is_saved_is_not_written_through(tmp_path, what):
    """Nor is anything removed there.

    A save takes minutes, and somebody else may write into the run directory.
    """
    folder = tmp_path / "checkpoints"
    outside = tmp_path / "outside"
    for step in (5, 7):
        save(folder, step, 1.0)
    tmp = begin(folder, 10)
    write_shard(tmp, 0, {"w": np.zeros(10)})
    path = folder if what == "checkpoints" else tmp
    shutil.copytree(path, outside)
    path.rename(tmp_path / "away")
    path.symlink_to(outside)
    before = {each: each.is_file() and each.read_bytes() for each in outside.rglob("*")}
    for action in (
        lambda: write_shard(tmp, 1, {"v": np.zeros(10)}),
        lambda: commit(tmp, meta_of(10)),
        lambda: discard(folder / "step-00000005"),
        lambda: publish(tmp),
        lambda: begin(folder, 12),
    )[: 2 if what != "checkpoints" else 5]:
        with pytest.raises((CheckpointError, OSError), match="is a symbolic link"):
            action()
    assert {each: each.is_file() and each.read_bytes() for each in outside.rglob("*")} == before


def test_a_staging_directory_that_fails_is_named_with_its_own_setting(tmp_path):
    tmp = begin(tmp_path / "run", 10)
    with pytest.raises(
        CheckpointError, match=r"gone: checkpoint cannot be written: No such file .* change run\.staging"
    ):
        write_shard(tmp, 0, {"w": np.zeros(10)}, staging=tmp_path / "gone" / "s.h5")
    with pytest.raises(
        CheckpointError,
        match=r"/proc/self: checkpoint cannot be written: Input/output error; .* change run\.staging",
    ):
        drain(Path("/proc/self/mem"), tmp / "shard-00000.h5")  # which nobody has at address 0


@pytest.mark.parametrize("name", ["step-00000010", "step-00000010.tmp"])
def test_a_file_with_the_name_of_a_step_is_named_and_stays(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=f"{name} is no folder; .* move it away"):
        begin(tmp_path, 10)
    assert (tmp_path / name).read_text() == "mine"
