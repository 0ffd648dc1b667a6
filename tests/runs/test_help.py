"""Help on the command line: of every command, on any terminal, without a command, into a pipe that
nobody reads.
"""

import re
import sys

import click
import pytest
from click.testing import CliRunner
from conftest import LONG
from launch import MPITRAIN, environment, finished, mpirun

from mpitrain.cli import cli


def commands(group: click.Group, *words: str) -> list[tuple[str, ...]]:
    """Return the words of every command, groups too."""
    found = [words]
    for name, command in group.commands.items():
        found += commands(command, *words, name) if isinstance(command, click.Group) else [(*words, name)]
    return found


EVERY = commands(cli)
GROUPS = [(), ("bench",), ("ckpt",), ("data",), ("job",)]


def test_these_are_the_groups():
    assert {words[:-1] for words in EVERY if words} == set(GROUPS)


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
@pytest.mark.parametrize(
    "command", [[MPITRAIN], [sys.executable, "-m", "mpitrain"]], ids=["script", "module"]
)
def test_without_a_command_there_is_help_and_exit_code_2(words, command):
    """Whatever version of click is there.

    Before 8.2 it ends with 0, from 8.2 on it has standard error for it.
    """
    done, asked = (
        finished([*command, *words, *more], capture_output=True, text=True, env=environment())
        for more in ((), ("--help",))
    )
    assert (done.returncode, asked.returncode, done.stdout, asked.stderr) == (2, 0, "", "")
    assert done.stderr == asked.stdout
    assert len(done.stderr.splitlines()) > 10
    assert "\\n" not in done.stderr


def test_without_a_command_ranks_say_it_once():
    assert mpirun(2, MPITRAIN).output.count("Usage: ") == 1


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_lines_fit_a_terminal(words, columns):
    """On a wide one as many columns as can be read, 110."""
    done = CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": str(columns)}, prog_name="mpitrain")
    assert done.exit_code == 0, done.output
    assert not [line for line in done.output.splitlines() if len(line) > min(columns, 110)], done.output


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
def test_each_command_stands_in_a_line_with_a_sentence(words):
    text = CliRunner().invoke(cli, [*words, "--help"], terminal_width=80).output.partition("Commands:\n")[2]
    for line in text.splitlines():
        assert re.fullmatch(r"  [a-z]+ +[A-Z].*[^.]\.", line), line


def test_a_narrow_terminal_cuts_no_sentence():
    text = CliRunner().invoke(cli, ["--help"], terminal_width=40).output
    assert "..." not in text.partition("Commands:\n")[2]


@pytest.mark.parametrize("words", [["--help"], ["ckpt", "prune", "-h"], []], ids=" ".join)
@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"NO_COLOR": "1"},
        {"COLUMNS": "40"},
        {"COLUMNS": "0"},
    ],
    ids=str,
)
def test_in_any_environment(words, env):
    done = finished([MPITRAIN, *words], capture_output=True, env=environment(**env))
    text = done.stdout or done.stderr
    assert (
        done.returncode == (0 if words else 2)
        and text.startswith(b"Usage: mpitrain")
        and b"\x1b" not in text
        and text.isascii()
    )


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
@pytest.mark.parametrize("to", ["--help", "2>&1"])
def test_a_reader_may_leave(words, to):
    shell = f'{MPITRAIN} {" ".join(words)} {to} | head -n 1; echo "${{PIPESTATUS[0]}}"'
    done = finished(["bash", "-c", shell], capture_output=True, text=True, env=environment())
    assert done.stdout.splitlines()[1:] == ["0" if to == "--help" else "2"], done
    assert not done.stderr, done


def test_the_version_is_of_mpitrain_however_it_was_called():
    every = [MPITRAIN], [sys.executable, "-m", "mpitrain"], [sys.executable, "-m", "mpi4py", "-m", "mpitrain"]
    found = {
        finished([*words, "--version"], capture_output=True, text=True, env=environment()).stdout
        for words in every
    }
    assert len(found) == 1 and found.pop().startswith("mpitrain, version ")


@LONG
def test_as_a_module_it_starts_ranks(tmp_path):
    """Those of `verify`, which starts mpirun itself."""
    small = (
        "model.layers=1",
        "model.width=16",
        "model.heads=1",
        "model.kv_heads=1",
        "model.ffn=16",
        "data.sequence=16",
        "batch.global=2",
    )
    words = ("verify", "--layout", "dp=2", *(f"--set={each}" for each in small), f"--set=run.dir={tmp_path}")
    done = finished(
        [sys.executable, "-m", "mpitrain", *words],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("run --resume", "the same command resumes from the newest checkpoint of run.dir"),
        ("run --lr 3e-4", "use --set optimizer.lr=VALUE"),
        ("run --tp 2", "use --set parallel.tp=VALUE"),
        ("run --batch-size=3", "use --set batch.global=VALUE"),
        ("check --tensor-model-parallel-size 2", "use --set parallel.tp=VALUE"),
        ("memory --gradient-accumulation-steps 2", "follows from batch.global / batch.micro / parallel.dp"),
        ("run --steps 5", "add --dry-run, or use --set run.steps=5"),
        ("run x.toml run.steps=3", "keys are changed by --set run.steps=3"),
        ("run run.steps=3", "a key is changed by --set run.steps=3"),
        ("train my.toml", "No such command 'train'; use mpitrain run"),
        ("sample", "use mpitrain generate"),
        ("convert x", "use mpitrain export"),
    ],
)
def test_what_users_of_other_trainers_type_is_answered_with_ours(words, hint):
    done = finished([MPITRAIN, *words.split()], capture_output=True, text=True, env=environment())
    assert done.returncode == 2 and hint in done.stderr, done.stderr
    assert "Did you mean" not in done.stderr and "Traceback" not in done.stderr
