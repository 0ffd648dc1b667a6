"""A disk fails in any one call: what a command makes is whole or not there; one message says why."""

import errno
import re
import shutil
from pathlib import Path

import model_folders
import pytest
from click.testing import CliRunner
from storage_faults import SYNC, built, tree, walked

from mpitrain.cli import cli

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build the library")
STRIDE = 29  # of calls that neither rename nor sync: one of so many fails
COMMANDS = {
    "import of a step": ("import", "model", "--to", "made/checkpoints/step-00000007"),
    "export": ("export", "run", "--to", "made", "--no-prove"),
    "import": ("import", "model", "--to", "made"),
    "reshard": ("ckpt", "reshard", "run", "made", "--shards", "2"),
}
OLD_INDEX = Path(__file__).parents[1] / "golden/checkpoints-h5py-3.14"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return built(tmp_path_factory.mktemp("library"))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_failing_disk_leaves_is_whole_or_nothing(tmp_path, monkeypatch, library, name):
    error = errno.ESTALE if name == "reshard" else errno.EIO
    monkeypatch.chdir(tmp_path)
    model_folders.folder(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text("{}")
    if name in ("export", "reshard"):
        assert CliRunner().invoke(cli, ["import", "model", "--to", "run"]).exit_code == 0
    clean, *faults = walked(library, tmp_path, STRIDE, error, *COMMANDS[name])
    assert clean["code"] == 0 and sum(fault["kinds"] == SYNC for fault in faults) > 3
    for fault in faults:
        made = [path for path in fault["left"] if path.startswith("made")]
        assert "Traceback" not in fault["text"], fault
        if fault["code"] == 0:
            assert fault["left"] == clean["left"], fault
        elif fault["code"] == 1:  # what was exported can't be read back
            assert "it is left in made.export.tmp" in fault["text"], fault
            assert "made.export.tmp/config.json" in made and "made" not in made, fault
        else:
            assert fault["code"] == 2 and fault["text"].count("Error: ") == 1, fault
            assert "made/config.toml" not in made, fault
            assert not any(re.search(r"step-\d+$", path) for path in made), fault
        assert fault["again"] == 0 and fault["then"] == clean["left"], fault


def test_a_failing_disk_leaves_what_prune_says(tmp_path, monkeypatch, library):
    monkeypatch.chdir(tmp_path)
    model_folders.folder(tmp_path / "model")
    for step in (2, 4, 6):
        to = f"run/step-{step:08d}"
        assert CliRunner().invoke(cli, ["import", "model", "--to", to]).exit_code == 0
    kept = [path for path in tree(tmp_path) if path.startswith("run")]
    clean, *faults = walked(library, tmp_path, 7, errno.EIO, "ckpt", "prune", "run", "--keep", "1")
    left = [path for path in clean["left"] if path.startswith("run")]
    assert clean["code"] == 0 and "removed 2 steps (2, 4)" in clean["text"]
    assert sum(fault["kinds"] == SYNC for fault in faults) >= 4
    for fault in faults:
        there = [path for path in fault["left"] if path.startswith("run")]
        assert "Traceback" not in fault["text"] and set(left) <= set(there), fault
        whole = [step for step in (2, 4, 6) if files_of(step, there) == files_of(step, kept)]
        named = set(re.findall(r"step-(\d+)$", "\n".join(there), re.MULTILINE))
        assert [int(step) for step in sorted(named)] == whole, fault
        if fault["code"] == 2 and "cannot be removed" in fault["text"]:
            step, state = re.search(r"step (\d) cannot be removed, it (.*?):", fault["text"]).groups()
            assert (int(step) in whole) is (state == "is intact"), fault
            assert ("removed before: step 2" in fault["text"]) is (2 not in whole and step == "4"), fault
        elif fault["code"] == 2:
            assert there == kept and fault["text"].count("Error: ") == 1, fault
        elif fault["code"] == 1:
            assert "can't be read" in fault["text"] or "cannot be read" in fault["text"], fault
        else:
            assert fault["code"] == 0 and there == left, fault
        assert fault["again"] == 0 and fault["then"] == clean["left"], fault


def test_repair_rewrites_an_index_only_for_what_is_in_it(tmp_path, library):
    """A disk that refuses to read a good index makes it no bad one, and a bad one stays or is replaced."""
    shutil.copytree(OLD_INDEX, tmp_path / "run")
    clean, *faults = walked(library, tmp_path, STRIDE, errno.ESTALE, "ckpt", "repair", "run")
    assert clean["code"] == 0 and "it was rewritten" in clean["text"]
    for fault in faults:
        assert "Traceback" not in fault["text"] and "Stale file handle)" not in fault["text"], fault
        assert (fault["code"] == 0) == ("Stale file handle" not in fault["text"]), fault
        assert fault["again"] == 0 and fault["then"] == clean["left"], fault


def files_of(step, paths):
    """Return the names of a step's files, whatever its folder is called."""
    return sorted(path.partition("/step-")[2][9:] for path in paths if f"step-{step:08d}/" in path)
