"""What a run directory holds is not lost by a refusal, by damage beside it, or by a run that diverges."""

import json
import shutil

import pytest
from launch import lines_in, loss_lines, run_tiny, tail, write_text

SETTINGS = dict(run_steps=20, run_save_every=10, schedule_name="constant")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("lost") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """A run of 20 steps."""
    run_dir = tmp_path_factory.mktemp("lost") / "whole"
    done = run_tiny(1, run_dir, text, **SETTINGS)
    assert done.returncode == 0, tail(done.output)
    return run_dir


@pytest.fixture
def run_dir(tmp_path, whole):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "run")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metrics(folder):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- check everything, then write


@pytest.mark.parametrize("size", [15_000, 200])
def test_a_refused_corpus_changes_nothing(run_dir, tmp_path, size):
    """Other text, or too little of it: known only when it is tokenised."""
    before = contents(run_dir)
    other = write_text(tmp_path / "other.txt", size)
    done = run_tiny(2, run_dir, other, **{**SETTINGS, "run_steps": 40})
    assert done.returncode == 2 and done.output.count("Error: ") == 1, tail(done.output)
    assert contents(run_dir) == before


def test_a_corpus_that_changed_under_its_name_changes_nothing(tmp_path):
    text, run_dir = write_text(tmp_path / "text.txt", 20_000), tmp_path / "run"
    assert run_tiny(1, run_dir, text, run_steps=2).returncode == 0
    before = contents(run_dir)
    with open(text, "a") as file:
        file.write("one more line\n")
    done = run_tiny(1, run_dir, text, run_steps=4)
    assert done.returncode == 2 and "trained on other data" in done.output, tail(done.output)
    assert contents(run_dir) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "trace.json"])
def test_a_folder_in_the_place_of_a_file_is_refused(run_dir, text, name):
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    before = contents(run_dir)
    done = run_tiny(1, run_dir, text, **SETTINGS)
    assert done.returncode == 2 and f"{name} is a folder, needed a file" in done.output, tail(done.output)
    assert contents(run_dir) == before


@pytest.mark.parametrize("name", ["data", "checkpoints"])
def test_a_file_in_the_place_of_a_folder_is_refused(run_dir, text, name):
    shutil.rmtree(run_dir / name)
    (run_dir / name).write_text("")
    before = contents(run_dir)
    done = run_tiny(1, run_dir, text, **SETTINGS)
    assert done.returncode == 2 and f"{name} is a file, needed a folder" in done.output, tail(done.output)
    assert contents(run_dir) == before


# ---------------------------------------------------------------- damaged metrics


def test_damaged_lines_of_metrics_keep_nobody_from_going_on(run_dir, text, whole):
    damage = (b"\xff\xfe", b"\0\0", b"[" * 100_000, b'{"step": "9"}', b"null")
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:5], *(each + b"\n" for each in damage), *lines[10:]])
    (run_dir / "metrics.jsonl").write_bytes(damaged)
    done = run_tiny(1, run_dir, text, **{**SETTINGS, "run_steps": 22})
    assert done.returncode == 0 and "line 6 can't be read" in done.output, tail(done.output)
    assert (run_dir / "metrics.jsonl.damaged").read_bytes() == damaged
    before = loss_lines(whole)
    assert loss_lines(run_dir)[:16] == [*before[:5], *before[10:]]


def test_a_torn_last_line_goes_without_a_word(run_dir, text, whole):
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 21, "los')
    done = run_tiny(1, run_dir, text, **{**SETTINGS, "run_steps": 22})
    assert done.returncode == 0 and "can't be read" not in done.output, tail(done.output)
    assert loss_lines(run_dir)[:21] == loss_lines(whole)


# ---------------------------------------------------------------- a run that diverges


def test_a_run_that_diverges_ends_with_its_last_good_checkpoint(tmp_path, text):
    """The first update makes weights whose gradients are not finite."""
    run_dir = tmp_path / "run"
    given = dict(run_steps=500, run_save_every=1, run_max_skips=5, optimizer_lr=1e30, run_eval_every=0)
    done = run_tiny(2, run_dir, text, **given)
    assert done.returncode == 1 and "done:" not in done.output, tail(done.output)
    assert "5 in a row of at most 5 (run.max_skips)" in done.output and "diverged: 5 steps" in done.output, tail(done.output)
    assert lines_in(run_dir) == 6 and metrics(run_dir)[-1]["skipped"] == 5
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_run_that_ends_diverged_is_no_success(tmp_path, text):
    done = run_tiny(1, tmp_path / "run", text, run_steps=3, run_save_every=0, optimizer_lr=1e30)
    assert done.returncode == 1 and "done:" not in done.output and "step 3 is not saved" in done.output, tail(done.output)
    assert not list((tmp_path / "run").glob("checkpoints/step*"))


def test_fp16_looks_for_its_scale_and_is_saved(tmp_path, text):
    """Skips are part of it; steps without a finite gradient are few, and the weights are good."""
    done = run_tiny(1, tmp_path / "run", text, run_steps=12, precision_compute="fp16", run_save_every=1)
    assert done.returncode == 0, tail(done.output)
    assert len(list((tmp_path / "run").glob("checkpoints/step*"))) == 12
