"""What a run directory holds is not lost by a refusal, by damage beside it, by a full disk, or by a
run that diverges.
"""

import json
import os
import random
import resource
import shutil
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import EVERY, LONG, WITH_LONG, but_for
from launch import (
    MPITRAIN,
    lines_in,
    loss_lines,
    mpirun,
    run_commands,
    run_several,
    tail,
    tiny,
    words_file,
    write_text,
)

from mpitrain.cluster.rundir import RunDir
from mpitrain.config import Config, LoadedConfig, load
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.origins import NONE
from mpitrain.plan.settings.resolve import resolve

SETTINGS = dict(run_steps=20, run_save_every=10, schedule_name="constant")


BY_CHOICE = {"longer", "a folder for trace.json", "a file for data", "fp16"}  # cases


def named(names, case="{}"):
    """Return cases for parametrize()."""
    return but_for([*names], longer=[name for name in names if case.format(name) in BY_CHOICE])


def chosen(cases):
    return {name: case for name, case in cases.items() if WITH_LONG or EVERY or name not in BY_CHOICE}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("lost") / "text.txt", 20_000)


# {name of a corpus: what it becomes after a run on it}
CHANGED = {"other": lambda text: text[5000:], "longer": lambda text: text + b"one more line\n"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """A run of 20 steps; beside it runs of 2, each on a corpus of its own."""
    folder = tmp_path_factory.mktemp("lost")
    for name in CHANGED:
        shutil.copy(text, folder / f"{name}.txt")
    short = {
        folder / name: {**SETTINGS, "run_steps": 2, "data_path": folder / f"{name}.txt"}
        for name in chosen(CHANGED)
    }
    run_several(1, text, {folder / "whole": SETTINGS, **short})
    return folder / "whole"


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metrics(folder):
    def refuse(name):
        raise AssertionError(f"{name} is invalid JSON")

    return [
        json.loads(line, parse_constant=refuse)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def folder_for_file(run_dir, name):
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()


def file_for_folder(run_dir, name):
    shutil.rmtree(run_dir / name)
    (run_dir / name).write_text("")


def damaged(run_dir, name):
    damage = (b"\xff\xfe", b"\0\0", b"[" * 100_000, b'{"step": "9"}', b"null")
    lines = (run_dir / name).read_bytes().splitlines(keepends=True)
    (run_dir / name).write_bytes(b"".join([*lines[:5], *(each + b"\n" for each in damage), *lines[10:]]))


def torn(run_dir, name):
    with open(run_dir / name, "ab") as file:
        file.write(b'{"step": 21, "los')


FOLDERS = ("metrics.jsonl", "config.toml", "trace.json")
FILES = ("data", "checkpoints")
# {case: (what is done to a copy of a whole run, to what, what is then asked for)}; no copy if
# nothing is done
CASES = {
    **{f"a folder for {name}": (folder_for_file, name, {}) for name in FOLDERS},
    **{f"a file for {name}": (file_for_folder, name, {}) for name in FILES},
    "no draft": (folder_for_file, "config.toml.tmp", {"run_steps": 22}),
    "damaged": (damaged, "metrics.jsonl", {"run_steps": 22}),
    "torn": (torn, "metrics.jsonl", {"run_steps": 22}),
    "diverges at the end": (None, "", {"run_steps": 3, "run_save_every": 0, "optimizer_lr": 1e30}),
    "fp16": (None, "", {"run_steps": 12, "precision_compute": "fp16", "run_save_every": 1}),
}
ON_TWO = {  # the same on two ranks
    **{name: (None, "", {"run_steps": 4, "data_path": f"{name}.txt"}) for name in CHANGED},
    "diverges": (
        None,
        "",
        dict(run_steps=500, run_save_every=1, run_max_skips=5, optimizer_lr=1e30, run_eval_every=0),
    ),
}


@pytest.fixture(scope="module")
def ended(whole, text):
    """{case: (its run directory, what was there before, how it ended)}. All cases run in the same ranks."""
    folder = whole.parent
    for name, change in CHANGED.items():
        (folder / f"{name}.txt").write_bytes(change(text.read_bytes()))
    found = {}
    for num_ranks, cases in ((1, chosen(CASES)), (2, chosen(ON_TWO))):
        commands = []
        before = []
        for name, (change, what, asked) in cases.items():
            if change is not None:
                shutil.copytree(whole, folder / name)
                change(folder / name, what)
            before.append(contents(folder / name))
            asked = asked | ({"data_path": folder / asked["data_path"]} if "data_path" in asked else {})
            commands.append(("run", *tiny(folder / name, text, **SETTINGS | asked)))
        done = run_commands(num_ranks, *commands, timeout=180)
        found |= {name: (folder / name, *each) for name, *each in zip(cases, before, done, strict=True)}
    return found


def require_refused(case, words):
    run_dir, before, done = case
    assert done.returncode == 2, tail(done.output)
    assert done.output.count("Error: ") == 1, tail(done.output)
    assert words in done.output, tail(done.output)
    assert contents(run_dir) == before


# ---------------------------------------------------------------- check everything, then write


@pytest.mark.parametrize("name", named(CHANGED))
def test_a_corpus_that_changed_under_its_name_changes_nothing(ended, name):
    """Known only when it is tokenised."""
    require_refused(ended[name], "trained on other data")


@LONG
def test_another_tokenizer_is_named(tmp_path):
    """One with the same words in another order, and one with a word more.

    An equal one, written with other spaces, resumes.
    """
    words = {
        word: number
        for number, word in enumerate(
            ["a", "run", "goes", "on", "with", "the", "bits", "of", "one", "that", "was"]
        )
    }
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(1).choices([*words], k=4000)))
    orders = {
        "other": dict(zip(words, reversed(range(len(words))))),
        "more": words | {"never": len(words)},
        "spaced": words,
    }
    files = {name: words_file(tmp_path / f"{name}.json", words) for name in orders}
    commands = [
        ("run", *tiny(tmp_path / name, text, data_tokenizer=file, run_steps=1))
        for name, file in files.items()
    ]
    first = run_commands(1, *commands)
    assert [done.returncode for done in first] == [0, 0, 0], tail(first[0].output)
    before = contents(tmp_path / "other"), contents(tmp_path / "more")
    for name, order in orders.items():
        words_file(files[name], order)
    files["spaced"].write_text(json.dumps(json.loads(files["spaced"].read_text())))
    other, more, spaced = run_commands(1, *commands)
    said = (
        "trained on other data than text gives now, with another tokenizer (data.tokenizer = "
        f'"{files["other"]}")'
    )
    require_refused((tmp_path / "other", before[0], other), said)
    require_refused(
        (tmp_path / "more", before[1], more), "holds a run with model.vocab = 11, this one has 12"
    )
    assert f"and its tokenizer, data.tokenizer = '{files['more']}' as it was then" in more.output, tail(
        more.output
    )
    assert spaced.returncode == 0, tail(spaced.output)


@pytest.mark.parametrize("name", named(FOLDERS, "a folder for {}"))
def test_a_folder_in_the_place_of_a_file_is_refused(ended, name):
    require_refused(ended[f"a folder for {name}"], f"{name} is a folder, needed a file")


@pytest.mark.parametrize("name", named(FILES, "a file for {}"))
def test_a_file_in_the_place_of_a_folder_is_refused(ended, name):
    require_refused(ended[f"a file for {name}"], f"{name} is a file, needed a folder")


# ---------------------------------------------------------------- damaged metrics


def test_damaged_lines_of_metrics_keep_no_run_from_resuming(ended, whole):
    run_dir, before, done = ended["damaged"]
    assert done.returncode == 0 and "line 6 can't be read" in done.output, tail(done.output)
    assert (run_dir / "metrics.jsonl.damaged").read_bytes() == before[Path("metrics.jsonl")]
    lines = loss_lines(whole)
    assert loss_lines(run_dir)[:16] == [*lines[:5], *lines[10:]]


def test_a_line_that_fills_the_memory_is_not_read(tmp_path):
    rundir = metrics_of(tmp_path / "run", range(3))
    os.truncate(rundir.metrics, 1 << 40)
    with pytest.raises(
        CheckpointError, match=r"metrics\.jsonl: line 4 has more than 16,777,216 bytes.*; move the file away"
    ):
        rundir.truncate_metrics(2)
    assert rundir.metrics.stat().st_size == 1 << 40


def test_a_torn_last_line_goes_without_a_word(ended, whole):
    run_dir, _, done = ended["torn"]
    assert done.returncode == 0 and "can't be read" not in done.output, tail(done.output)
    assert loss_lines(run_dir)[:21] == loss_lines(whole)


# ---------------------------------------------------------------- a full disk


@contextmanager
def full_disk():
    """Let no file of this process grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_configuration_that_cannot_be_written_is_bad_input_and_leaves_nothing(ended, tmp_path):
    require_refused(ended["no draft"], "config.toml cannot be written: Is a directory; free some space")
    given = LoadedConfig(Config(), NONE)
    with full_disk(), pytest.raises(CheckpointError, match=r"config\.toml cannot be written: File too large"):
        RunDir(tmp_path).begin(given, given)
    assert not list(tmp_path.iterdir())


def metrics_of(folder, steps):
    folder.mkdir()
    rundir = RunDir(folder)
    rundir.metrics.write_bytes(
        b"".join(b'{"step": %d}\n' % step if step is not None else b"damaged\n" for step in steps)
    )
    return rundir


def test_lines_are_cut_without_room_for_others(tmp_path):
    rundir = metrics_of(tmp_path / "run", range(5))
    with full_disk():
        assert rundir.truncate_metrics(2) == ""
    assert [line["step"] for line in metrics(rundir.path)] == [0, 1, 2]


def test_a_damaged_file_is_not_cut_before_it_is_kept(tmp_path):
    rundir = metrics_of(tmp_path / "run", [0, None, 2, 3])
    before = contents(rundir.path)
    with (
        full_disk(),
        pytest.raises(
            CheckpointError, match=r"metrics\.jsonl cannot be written: File too large; free some space"
        ),
    ):
        rundir.truncate_metrics(2)
    assert contents(rundir.path) == before
    assert "line 2 can't be read" in rundir.truncate_metrics(2)
    assert [line["step"] for line in metrics(rundir.path)] == [0, 2]


def test_a_file_with_another_name_is_cut_under_one_only(tmp_path):
    rundir = metrics_of(tmp_path / "run", range(5))
    os.link(rundir.metrics, tmp_path / "elsewhere")
    rundir.truncate_metrics(2)
    rundir.append_to_metrics('{"step": 3}\n')
    assert len(metrics(rundir.path)) == 4
    assert len((tmp_path / "elsewhere").read_text().splitlines()) == 5


def test_a_run_trains_on_without_the_files_that_it_can_do_without(tmp_path, text):
    run_dir = tmp_path / "run"
    steps = {"run_steps": 3, "run_trace": 1, "run_routing": 2}
    names = ("trace.json", "routing.npz", "record-1-2.npz", "loads.svg")
    for name in names:
        (run_dir / f"{name}.tmp").mkdir(parents=True)
    experts = dict(model_family="mixtral", experts_count=4, experts_active=2, parallel_ep=2, parallel_dp=2)
    done = mpirun(2, MPITRAIN, "run", "--record", "1:2", *tiny(run_dir, text, **SETTINGS | steps | experts))
    assert done.returncode == 0 and lines_in(run_dir) == 3, tail(done.output)
    messages = [f"{run_dir / name} can't be written: Is a directory" for name in names[:3]] + [
        "can't be drawn: Is a directory"
    ]
    assert [done.output.count(each) for each in messages] == [1] * 4, tail(done.output)
    assert "look closer" not in done.output, tail(done.output)
    assert not [name for name in names if (run_dir / name).exists()]


# ---------------------------------------------------------------- a run that diverges


def test_a_run_that_diverges_ends_with_its_last_good_checkpoint(ended):
    """The first update makes weights whose gradients are not finite."""
    run_dir, _, done = ended["diverges"]
    assert done.returncode == 1 and "done:" not in done.output, tail(done.output)
    assert "5 in a row of at most 5 (run.max_skips)" in done.output, tail(done.output)
    assert "diverged: 5 steps" in done.output, tail(done.output)
    assert lines_in(run_dir) == 6 and metrics(run_dir)[-1]["skipped"] == 5
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_run_that_ends_diverged_is_no_success(ended):
    run_dir, _, done = ended["diverges at the end"]
    assert done.returncode == 1, tail(done.output)
    assert "done:" not in done.output, tail(done.output)
    assert "step 3 is not saved" in done.output, tail(done.output)
    assert not list(run_dir.glob("checkpoints/step*"))


@LONG
def test_fp16_looks_for_its_scale_and_is_saved(ended):
    """Skips are part of it; steps without a finite gradient are few, and the weights are good."""
    run_dir, _, done = ended["fp16"]
    assert done.returncode == 0, tail(done.output)
    assert len(list(run_dir.glob("checkpoints/step*"))) == 12


@LONG
def test_the_configuration_of_a_moved_run_says_where_it_leads(tmp_path, text):
    first = tmp_path / "first"
    moved = tmp_path / "moved"
    run_several(1, text, {first: dict(SETTINGS, run_steps=1)})
    shutil.copytree(first, moved)
    here = ("run", str(moved / "config.toml"), "--set", "run.steps=2")
    resumed, asked = run_commands(1, here, (*here, "--set", f"run.dir={moved}"))
    said = f"{moved}/config.toml is in a run directory, but names another: run.dir = {first}"
    assert resumed.returncode == 0, tail(resumed.output)
    assert f"{said}; --set run.dir={moved} resumes" in resumed.output, tail(resumed.output)
    assert f"resuming after step 1 of {first}" in resumed.output
    assert asked.returncode == 0, tail(asked.output)
    assert said not in asked.output, tail(asked.output)
    assert lines_in(moved) == lines_in(first) == 2, tail(asked.output)


def test_a_users_own_configuration_is_no_run_and_is_not_replaced(tmp_path):
    """Nor is one with a base, which no resolved one has; a run that was killed before its first
    line resumes.
    """
    rundir = RunDir(tmp_path)
    config = resolve(load(None, ["model.width=32", f"run.dir={tmp_path}"]), 1, 256)
    for own in ("[model]\nwidth = 32\n", 'base = "../base.toml"\n'):
        rundir.config.write_text(own)
        with pytest.raises(CheckpointError, match=r"holds a config.toml, but no run, which would replace it"):
            rundir.require_same_run(config)
        assert rundir.config.read_text() == own
    rundir.begin(LoadedConfig(config, NONE), LoadedConfig(config, NONE))
    rundir.require_same_run(config)
    rundir.metrics.write_text("")
    with pytest.raises(ConfigError, match=r"holds a run with model.width = 32, this one has 64"):
        rundir.require_same_run(resolve(load(None, ["model.width=64"]), 1, 256))


@pytest.mark.parametrize("what", ["full", "link", "FIFO", "folder"])
def test_lines_that_cannot_be_written_are_kept_until_they_can_be(tmp_path, what):
    """On a full disk, and where somebody has put something else in the place of the file.

    A link is not written through.
    """
    rundir = RunDir(tmp_path)
    victim = tmp_path / "victim"
    assert rundir.append_to_metrics('{"step": 1}\n') == "" and rundir.lost() == ""
    real = tmp_path / "real"
    rundir.metrics.rename(real)
    victim.write_text("line one of a user\nline two\n")
    if what == "FIFO":
        os.mkfifo(rundir.metrics)
    elif what == "folder":
        rundir.metrics.mkdir()
    elif what == "link":
        rundir.metrics.symlink_to(victim)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if what == "full":
        real.replace(rundir.metrics)
        resource.setrlimit(resource.RLIMIT_FSIZE, (rundir.metrics.stat().st_size, limits[1]))
    try:
        said = rundir.append_to_metrics('{"step": 2}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    wanted = {
        "full": "File too large",
        "link": "it is a symbolic link",
        "FIFO": "it is a FIFO",
        "folder": "it is a folder",
    }[what]
    assert f"can't be written: {wanted}" in said
    assert said.endswith("its lines are kept until they can be")
    if what == "full":
        rundir.metrics.rename(real)
        rundir.metrics.symlink_to("/dev/full")
    rundir.sync_metrics()
    assert rundir.append_to_metrics('{"step": 3}\n') == ""
    assert "lacks the last 2 lines" in rundir.lost()
    if what != "folder":
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written: it is a"):
            rundir.truncate_metrics(10)
    assert (
        victim.read_text() == "line one of a user\nline two\n"
        and not (tmp_path / "metrics.jsonl.damaged").exists()
    )
    rundir.metrics.rmdir() if what == "folder" else rundir.metrics.unlink()
    real.replace(rundir.metrics)
    assert "has all lines again" in rundir.append_to_metrics('{"step": 4}\n')
    assert [json.loads(line)["step"] for line in rundir.metrics.read_text().splitlines()] == [1, 2, 3, 4]


def test_of_a_metrics_jsonl_without_end_little_is_kept_in_memory(tmp_path):
    """Some lines that no run has written are kept aside.

    A file of nothing else is refused, with the first of them.
    """
    rundir = RunDir(tmp_path)
    odd = [
        '{"step": ' + "9" * 5000 + "}",
        '{"step": true}',
        '{"step": Infinity}',
        "[" * 100_000,
        '{"step": "1"}',
        "\x1b[2J",
        "",
    ]
    lines = ['{"step": 1}', *odd, '{"step": 2}', '{"step": 3}']
    rundir.metrics.write_text("\n".join(lines) + "\n")
    assert rundir.truncate_metrics(2).endswith(
        "line 2 can't be read; the file is kept as metrics.jsonl.damaged"
    )
    assert rundir.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == "\n".join(lines) + "\n"
    with open(rundir.metrics, "ab") as file:
        file.write(b"\n" * 20_000_000)
    tracemalloc.start()
    with pytest.raises(
        CheckpointError, match="more than 1,000 lines can't be read, the first is line 3; move the file away"
    ):
        rundir.truncate_metrics(2)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
