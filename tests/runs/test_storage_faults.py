"""A disk fails in any one call: what a command makes is whole or not there; one message says why."""

import errno
import re
import shutil

import model_folders
import pytest
from click.testing import CliRunner
from storage_faults import SYNC, built, walked

from mpitrain.cli import cli

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build the library")
STRIDE = 29  # of calls that neither rename nor sync: one of so many fails
COMMANDS = {
    "import": ("import", "model", "--to", "made"),
    "import of a step": ("import", "model", "--to", "made/checkpoints/step-00000007"),
    "export": ("export", "run", "--to", "made", "--no-prove"),
    "reshard": ("ckpt", "reshard", "run", "made", "--shards", "2"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return built(tmp_path_factory.mktemp("library"))


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
