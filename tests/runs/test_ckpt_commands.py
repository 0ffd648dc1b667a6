"""`mpitrain ckpt`: what it says of checkpoints that are whole, damaged, old or somebody else's,
alone and on several ranks.
"""

import json
import os
import shutil
import sys
from itertools import chain
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from checkpoints import digest_of, meta_of, save
from conftest import LONG
from folders import GOLDEN
from launch import MPIRUN, finished, run_commands, started

from mpitrain.checkpoint.dtypes import BF16
from mpitrain.checkpoint.load import open_step, steps
from mpitrain.checkpoint.meta import StepInfo
from mpitrain.checkpoint.save import begin, commit, write_shard
from mpitrain.checkpoint.verify import shares, verify
from mpitrain.cluster.team import TeamOfOne
from mpitrain.commands.ckpt.maintenance import rewrite
from mpitrain.commands.ckpt.maintenance import verify as verify_steps
from mpitrain.errors import CheckpointError

OLD = {1: GOLDEN / "checkpoints-version-1", 2: GOLDEN / "checkpoints-version-2"}


def arrays_of(step):
    dice = np.random.default_rng(step)
    return {
        "parameters/w": dice.standard_normal((3000, 256), np.float32),
        "parameters/deep": dice.integers(0, 2**16, (5, 3, 7, 2), np.uint16).view(BF16),
        "parameters/none": np.zeros((0, 4), np.float32),
        "adam/m/w": dice.standard_normal(30_001),
        "adam/count": np.array(step, np.int64),
    }


@pytest.fixture
def folder(tmp_path):
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5)):
        save(tmp_path / "run" / "checkpoints", step, arrays_of(step), val_loss=loss)
    return tmp_path


def flip(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def run(*commands, num_ranks=0):
    return run_commands(num_ranks, *(["ckpt", *map(str, command)] for command in commands))


# ---------------------------------------------------------------- inspect


def test_inspect_says_who_wrote_what_and_how_it_is(folder):
    step = folder / "run" / "checkpoints" / "step-00000030"
    whole, one, as_json = run(
        ("inspect", folder / "run"), ("inspect", step, "--arrays"), ("inspect", folder / "run", "--json")
    )
    assert whole.returncode == one.returncode == as_json.returncode == 0, whole.output
    for words in (
        "3 steps",
        "2.0000  index and sizes are intact",
        "step 30",
        "me on node7",
        "layers 4",
        "pp(1) x dp(2)",
        "bf16, fp32",
    ):
        assert words in whole.output, whole.output
    assert "5 x 3 x 7 x 2" in one.output, one.output
    assert "3 steps" not in one.output, one.output
    assert "one number" in one.output, one.output
    found = json.loads(as_json.output)["steps"]
    assert [each["step"] for each in found] == [10, 20, 30] and found[2]["digest"] == digest_of(
        step.parent, 30
    )
    assert found[0]["meta"] == meta_of(10) | {"val_loss": 3.0}
    assert found[0]["writer"]["host"] == "node7"


def test_inspect_names_damage_and_the_newest_that_can_be_used(folder):
    checkpoints = folder / "run" / "checkpoints"
    (checkpoints / "step-00000030" / "shard-00001.h5").unlink()
    begin(checkpoints, 40)
    (done,) = run(("inspect", checkpoints))
    assert done.returncode == 1, done.output
    assert "damaged: step-00000030: shard-00001.h5 is missing" in done.output, done.output
    assert "\nstep 20\n" in done.output and "step-00000040.tmp" in done.output, done.output


@pytest.mark.parametrize(
    "command", ["inspect", *(pytest.param(each, marks=LONG) for each in ("verify", "prune --keep 1"))]
)
def test_what_is_no_checkpoint_is_bad_input(tmp_path, folder, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").touch()
    name, *options = command.split()
    for path in (
        tmp_path / "nowhere",
        tmp_path / "empty",
        tmp_path / "a.txt",
        folder / "run" / "checkpoints" / "step-00000040",
    ):
        code = (
            f"import sys; sys.argv[1:] = {['ckpt', name, str(path), *options]!r}\nfrom mpitrain.cli import "
            "main\nmain()"
        )
        done = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        said = " ".join(done.stderr.split())  # lines are folded where the folder's name is long
        assert done.returncode == 2 and said.count("CheckpointError: ") == 1, said
        assert "give a run directory" in said


def test_a_path_that_means_another_folder_or_none_is_refused_in_one_line(folder):
    checkpoints = folder / "run" / "checkpoints"
    # of a save that was killed; the step itself is there again
    old = checkpoints / "step-00000030.old"
    shutil.copytree(checkpoints / "step-00000020", old)
    (folder / "loop").symlink_to("loop")
    given = (
        ["verify", old],
        ["inspect", folder / "loop"],
        ["inspect", "a" * 4090],
        ["verify", folder / "run", "--sample", "nan"],
    )
    for done in run(
        *given,
        ["reshard", folder / "run", folder / ("a" * 300)],
        ["diff", old, checkpoints / "step-00000030"],
    ):
        assert done.returncode == 2, done.output
        assert "Traceback" not in done.output, done.output
        assert "Error: " in done.output, done.output


def test_what_a_stranger_says_of_his_libraries_is_shown_not_obeyed(tmp_path):
    tmp = begin(tmp_path, 10)
    write_shard(tmp, 0, {"parameters/w": np.zeros((2, 2), np.float32)})
    commit(tmp, meta_of(10), about=StepInfo("", {"user": "me", "the version of \x1b]0;evil\x07": "1"}))
    (done,) = run(("inspect", tmp_path))
    assert done.returncode == 0, repr(done.output)
    assert "evil" in done.output, repr(done.output)
    assert "\x1b" not in done.output, repr(done.output)


# ---------------------------------------------------------------- verify


def test_ranks_that_see_different_checkpoints_are_reported(folder, tmp_path):
    """Folders of nodes that aren't shared, or a run that saves meanwhile.

    Of one only would be said that it is intact.
    """
    save(tmp_path / "other" / "checkpoints", 30, arrays_of(31))
    code = (
        "import os, sys; os.chdir(sys.argv[1]); sys.argv[1:] = ['ckpt', 'verify', '.']; from mpitrain.cli "
        "import main; main()"
    )
    ranks = [
        word
        for path in (folder / "run", tmp_path / "other")
        for word in (":", "-n", "1", sys.executable, "-c", code, str(path))
    ]
    with started(0, MPIRUN, *ranks[1:]) as job:
        done = job.wait(60)
    assert (
        done.returncode == 2
        and "ranks see different checkpoints" in done.output
        and "intact" not in done.output
    ), done.output


def test_a_step_that_a_run_removes_meanwhile_is_not_called_damaged(folder):
    checkpoints = folder / "run" / "checkpoints"
    said = []

    def say(line):
        said.append(line)
        shutil.rmtree(checkpoints / "step-00000020", ignore_errors=True)

    assert verify_steps(TeamOfOne(), str(checkpoints), None, True, 1.0, say) == 0
    assert [line.split(";")[0] for line in said] == [
        "step 10: intact",
        "step 20: removed meanwhile",
        "step 30: intact",
    ]


@pytest.mark.parametrize("num_ranks", [0, 3])
def test_verify_names_every_altered_chunk(folder, num_ranks):
    checkpoints = folder / "run" / "checkpoints"
    shard = checkpoints / "step-00000020" / "shard-00001.h5"
    with h5py.File(shard) as file:
        damage = ("parameters/w@1500:3000,0:256", 4 * 256 * 1400), ("adam/m/w@15000:30001", 9)
        places = [file[name].id.get_offset() + at for name, at in damage]
    for place in places:
        flip(shard, place)
    (checkpoints / "step-00000010" / "index.xxh3").write_text("none")
    commands = [
        ("verify", folder / "run"),
        ("verify", folder / "run", "--step", 20),
        ("verify", folder / "run", "--all"),
    ]
    newest, altered, every = run(*commands, num_ranks=num_ranks)
    assert newest.returncode == 0, newest.output
    assert "step 30: intact; read 6 chunks, 3.3 MB" in newest.output, newest.output
    assert altered.returncode == every.returncode == 1, every.output
    assert "step-00000020: shard-00001.h5: chunk 2 of parameters/w is damaged\n" in altered.output, (
        altered.output
    )
    assert "shard-00000.h5 or shard-00001.h5: chunk 0 of adam/m/w is damaged\n" in altered.output, (
        altered.output
    )
    assert altered.output.count("is damaged") == 2, altered.output
    assert "step 20: damaged; read 6 chunks" in altered.output, altered.output
    assert every.output.count("index.h5 or index.xxh3 is damaged") == 1, every.output
    assert "step 30: intact" in every.output, every.output


@LONG
def test_a_sample_reads_fewer_and_the_same_on_all_ranks(folder):
    step = save(folder / "many", 1, {f"parameters/{i}": np.full(10, i) for i in range(300)})
    one, two = (run(("verify", step, "--sample", 0.1), num_ranks=num_ranks)[0] for num_ranks in (0, 2))
    counts = [int(done.output.split("read ")[1].split(" chunks")[0]) for done in (one, two)]
    assert "no damage in 10.0% of the chunks" in one.output, one.output
    assert counts[0] == counts[1], one.output
    assert 10 < counts[0] < 60, one.output


# ---------------------------------------------------------------- diff


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_diff_compares_arrays_whatever_layouts_wrote_them(folder, num_ranks):
    arrays = arrays_of(30)
    changed = {name: array.copy() for name, array in arrays.items() if name != "adam/count"} | {
        "extra": np.zeros(2)
    }
    changed["parameters/w"][2999, 255] += 0.5
    changed["adam/m/w"][[3, 4]] = np.nan, 7.0
    changed["parameters/deep"].view(np.uint16)[0, 0, 0, 0] ^= 0x8000  # the sign of one
    other = save(folder / "other", 30, changed, 5)
    same = save(folder / "same", 30, arrays, 7, val_loss=2.5)
    a = folder / "run"
    differs, only, equal = run(
        ("diff", a, other),
        ("diff", a, other, "--only", "parameters/n"),
        ("diff", a, same),
        num_ranks=num_ranks,
    )
    assert (differs.returncode, only.returncode, equal.returncode) == (1, 0, 0), (
        differs.output + only.output + equal.output
    )
    assert "equal: 5 arrays" in equal.output
    rows = {
        line.split()[0]: line.split()[1:]
        for line in differs.output.splitlines()
        if line.startswith("  ") and "/" in line
    }
    assert rows["adam/m/w"] == ["2", "30,001", "nan", "nan"] or rows["adam/m/w"][:3] == [
        "2",
        "30,001",
        "nan",
    ], differs.output
    assert rows["parameters/w"][:3] == ["1", "768,000", "0.5"] and rows["parameters/deep"][:2] == [
        "1",
        "210",
    ], differs.output
    for line in (
        "only in the first: adam/count",
        "only in the second: extra",
        "meta val_loss: 2.5 in the first, null in the second",
    ):
        assert line in differs.output, differs.output
    assert "equal: 1 array; different: 3:" in differs.output


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_beginning_that_no_name_has_is_bad_input(folder, num_ranks):
    (done,) = run(("diff", folder / "run", folder / "run", "--only", "paramters/"), num_ranks=num_ranks)
    assert (
        done.returncode == 2
        and "names begin with adam, parameters" in done.output
        and done.output.count("Error: ") == 1
    ), done.output


# ---------------------------------------------------------------- reshard


@pytest.mark.parametrize("num_shards", [1, 2, 3, 16])
def test_a_resharded_step_has_the_same_digest_and_says_the_same(folder, num_shards):
    rewrite(TeamOfOne(), str(folder / "run"), str(folder / "new"), 20, num_shards, lambda text: None)
    verify(folder / "new" / "step-00000020")
    with open_step(folder / "run" / "checkpoints", 20) as before, open_step(folder / "new", 20) as after:
        assert (before.digest, before.meta, before.about.config) == (
            after.digest,
            after.meta,
            after.about.config,
        )
        assert len(after.shards) == num_shards and after.about.writer["resharded_from"] == 2
        for name, array in arrays_of(20).items():
            found = after.read(name)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_one_shard_is_a_plain_file_with_every_array_whole(folder):
    (done,) = run(("reshard", folder / "run", folder / "new", "--shards", 1), num_ranks=2)
    assert done.returncode == 0 and "3.3 MB in 1 shard" in done.output, done.output
    with h5py.File(folder / "new" / "step-00000030" / "shard-00000.h5") as file:
        assert (file["parameters/w"][:] == arrays_of(30)["parameters/w"]).all() and file[
            "parameters/none"
        ].shape == (0, 4)


def test_ranks_share_the_writing(folder):
    (done,) = run(("reshard", folder / "run", folder / "new", "--shards", 5), num_ranks=3)
    assert done.returncode == 0, done.output
    assert digest_of(folder / "new", 30) == digest_of(folder / "run" / "checkpoints", 30)
    sizes = [path.stat().st_size for path in (folder / "new" / "step-00000030").glob("shard-*")]
    assert len(sizes) == 5 and max(sizes) < 1.1 * min(sizes)


def test_what_is_damaged_is_not_made_to_look_whole(folder):
    """New digests would be right for the wrong bytes."""
    flip(folder / "run" / "checkpoints" / "step-00000030" / "shard-00001.h5", 500_000)
    with pytest.raises(CheckpointError, match="what was read differs from what was written"):
        rewrite(TeamOfOne(), str(folder / "run"), str(folder / "new" / "below"), None, 3, lambda text: None)
    assert not (folder / "new").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_without_room_for_a_step_is_left_as_it_was(folder, monkeypatch, there):
    if there:
        (folder / "new").mkdir()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=1))
    with pytest.raises(CheckpointError, match=r"are needed, 0\.000 GB are free"):
        rewrite(TeamOfOne(), str(folder / "run"), str(folder / "new"), None, 3, lambda text: None)
    assert (folder / "new").exists() == there


def test_no_step_is_written_where_a_run_is(folder):
    (folder / "run" / "run.lock").write_text("")
    with pytest.raises(CheckpointError, match=r"run\.lock says that a run uses it"):
        rewrite(
            TeamOfOne(), str(folder / "run"), str(folder / "run" / "checkpoints"), None, 3, lambda text: None
        )


def test_shares_are_runs_of_about_equal_size():
    sizes = [5, 1, 1, 1, 9, 2, 2, 2, 1, 8]
    for num_parts in range(1, 12):
        parts = shares(sizes, sizes, num_parts)
        assert len(parts) == num_parts and [*chain(*parts)] == sizes
        assert max(map(sum, parts)) <= sum(sizes) / num_parts + max(sizes)
    assert shares([], [], 3) == [[], [], []]


# ---------------------------------------------------------------- prune


def test_prune_removes_what_a_run_would(folder):
    # only its digest tells
    flip(folder / "run" / "checkpoints" / "step-00000030" / "shard-00000.h5", 500_000)
    trial, best, again = run(
        ("prune", folder / "run", "--keep", 1, "--dry-run"),
        ("prune", folder / "run", "--keep", 1),
        ("prune", folder / "run", "--keep", 1),
    )
    assert (
        "would remove 1 step (10); would keep 2 steps (20, 30)" in trial.output
        and "using step-00000020" in trial.output
    )
    assert (
        trial.returncode == best.returncode == again.returncode == 1  # step 30 is damaged
        and "removed 1 step (10)" in best.output
        and "removed nothing" in again.output
    )
    assert steps(folder / "run" / "checkpoints") == [20, 30]


def test_prune_keeps_the_best_steps_by_any_metric(folder):
    """By what checkpoints say, and by what metrics.jsonl says of their steps."""
    lines = [json.dumps({"step": step, "grad_norm": step / 10}) + "\n" for step in (10, 20, 30)]
    (folder / "run" / "metrics.jsonl").write_text("".join(lines))
    words = ("prune", folder / "run", "--keep", 1, "--best", 1, "--dry-run")
    by_loss, by_norm, unknown = run(words, (*words, "--best-by", "grad_norm"), (*words, "--best-by", "acc"))
    assert "would remove 1 step (10); would keep 2 steps (20, 30)" in by_loss.output
    assert "would remove 1 step (20); would keep 2 steps (10, 30)" in by_norm.output
    assert unknown.returncode == 2
    assert "grad_norm, val_loss; use one of these, or leave --best out" in " ".join(unknown.output.split())


def test_prune_removes_nothing_where_nothing_is_whole(folder):
    for path in (folder / "run" / "checkpoints").glob("step-*/index.h5"):
        path.unlink()
    (done,) = run(("prune", folder / "run", "--keep", 1))
    assert (
        done.returncode == 2
        and "no checkpoint can be used" in done.output
        and len(steps(folder / "run" / "checkpoints")) == 3
    )


# ---------------------------------------------------------------- old ones, and what is loaded


@pytest.mark.parametrize(
    ("version", "about", "words"),
    [(1, StepInfo(), "version 1 of the format"), (2, StepInfo("[run]\n", {"layout": "dp(2)"}), "dp(2)")],
)
def test_a_checkpoint_of_an_earlier_version_is_read_as_ever(tmp_path, version, about, words):
    shutil.copytree(OLD[version], tmp_path / "old")
    with open_step(tmp_path / "old", 2) as old:
        assert (old.read("parameters/w") == np.arange(60, dtype=np.float32).reshape(12, 5)).all()
        assert (old.read("adam/m/w").view(np.uint16) == np.arange(7)).all()
        assert old.meta["tokens"] == 512 and old.about == about
    inspected, checked = run(("inspect", tmp_path / "old"), ("verify", tmp_path / "old"))
    assert (
        inspected.returncode == checked.returncode == 0
        and words in inspected.output
        and "intact" in checked.output
    )
    rewrite(TeamOfOne(), str(tmp_path / "old"), str(tmp_path / "new"), None, 1, lambda text: None)
    assert digest_of(tmp_path / "new", 2) == digest_of(OLD[version], 2)


def test_commands_load_neither_torch_nor_mpi(folder):
    code = (
        "import sys; from mpitrain.cli import cli\nfor each in ('inspect', 'verify'): cli(['ckpt', each, "
        f"{str(folder / 'run')!r}], "
    )
    code += "standalone_mode=False)\nprint(*sys.modules)"
    done = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "mpi4py.MPI", "rich"} & set(done.stdout.split())
