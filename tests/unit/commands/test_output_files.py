"""A command writes over no file that it reads, and writes one thing only to a file."""

import shutil
from importlib import resources

import pytest
from click.testing import CliRunner

from mpitrain.cli import cli
from mpitrain.commands.plan.sweep_layouts import require_files
from mpitrain.commands.requests import SweepRequest
from mpitrain.errors import BAD_INPUT, ConfigError
from mpitrain.schedules.catalog import build
from mpitrain.schedules.table import write_table

SIZE = "--stages 2 --microbatches 2"
MEANT = r"the command reads this file, or writes something else to it; give another name"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text("# mine\n[model]\nlayers = 2\n")
    (tmp_path / "my.toml").write_text('# mine\nbase = "base.toml"\n[run]\nmachine = "machine.toml"\n')
    (tmp_path / "rows.csv").write_text("system,model,gpu_type\n")
    (tmp_path / "table.csv").write_text(write_table(build("1f1b", 2, 2)))
    (tmp_path / "table.txt").write_text(write_table(build("1f1b", 2, 2)))
    (tmp_path / "other.txt").symlink_to("table.txt")
    shutil.copy(resources.files("mpitrain.jobs") / "machines" / "laptop.toml", tmp_path / "machine.toml")
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "words",
    [
        "plan my.toml --ranks 2 --out my.toml",
        "plan my.toml --ranks 2 --out base.toml",
        "plan my.toml --ranks 2 --out machine.toml",
        "plan --ranks 2 --machine machine.toml --out ./machine.toml",
        "plan --ranks 2 --all a.svg --timeline a.svg",
        "plan --ranks 2 --set pipeline.schedule=table.csv --all table.csv",
        "plan backtest rows.csv --out rows.csv",
        "schedule table.txt --table table.txt",
        "schedule table.txt --table other.txt",
        "schedule other.txt --out table.txt",
        f"schedule 1f1b {SIZE} --table a.txt --out a.txt",
        "schedule compare --trace table.txt --out table.txt",
    ],
)
def test_it_is_refused_and_nothing_changes(folder, words):
    before = contents(folder)
    done = CliRunner().invoke(cli, words.split())
    assert isinstance(done.exception, ConfigError), done.exception or done.output
    assert MEANT in str(done.exception) and done.exception.exit_code == BAD_INPUT
    assert contents(folder) == before


def test_a_sweep_does_not_write_over_its_layouts(folder):
    for asked in (dict(file="rows.csv", out="rows.csv"), dict(out="a.svg", svg="a.svg")):
        with pytest.raises(ConfigError, match=MEANT):
            require_files(SweepRequest(**asked))


def test_another_file_is_replaced(folder):
    (folder / "new.txt").write_text("old")
    done = CliRunner().invoke(cli, ["schedule", "table.txt", "--table", "new.txt"])
    assert done.exit_code == 0, done.exception
    assert (folder / "new.txt").read_text().startswith("# table.txt")
