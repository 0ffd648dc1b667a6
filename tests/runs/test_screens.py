"""What commands print on terminals of 80 and 100 columns, with and without mpirun; nothing of it in files."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner
from launch import MPIRUN, MPITRAIN, environment, finished, preloaded, run_tiny, tail, tiny

from mpitrain.cli import cli
from mpitrain.cluster.std_streams import terminal_of

LONG_NAME = "a-run-with-a-long-name-of-some-fifty-characters-00001"
STAGES = "--ranks 64 --set parallel.pp=16 --set model.layers=16"
COMMANDS = (
    "config",
    "config parallel.zero",
    "config optimizer",
    "config --of {run}",
    "check {run}/config.toml --ranks 2",
    f"check {STAGES}",
    "program --ranks 8 --set parallel.pp=2 --rank 1 --traffic",
    f"program {STAGES}",
    f"memory {STAGES}",
    "schedule zbv --stages 4 --microbatches 8",
    "schedule interleaved --stages 16 --microbatches 64 --chunks 2",
    "schedule compare --stages 4 --microbatches 8",
    "plan --ranks 64 --machine h100-80gb --set model.preset=llama3-8b --explain --tokens 1T",
    "job slurm {run}/config.toml --nodes 4 --time 12:00:00 --out {scratch}/job.sh",
    "job again 0 {run}/config.toml",
    "ckpt inspect {run}",
    "ckpt inspect {run} --arrays",
    "ckpt verify {run}",
    "ckpt diff {run}/checkpoints/step-00000001 {run}/checkpoints/step-00000002",
    "ckpt prune {run} --keep 1 --dry-run",
)
OTHERS = (  # they start MPI, or are refused
    "run --set batch.size=3",
    "doctor",
    "run {run}/nothing.toml",
    "check --ranks 7 --set parallel.tp=2",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("screens")
    text = folder / "text.txt"
    text.write_text("The words of a text. " * 4000)
    run = folder / LONG_NAME
    settings = dict(run_steps=2, run_save_every=1, run_eval_every=1)
    done = run_tiny(2, run, text, env={"COLUMNS": "80"}, **settings)
    assert done.returncode == 0, tail(done.output)
    (folder / "printed").write_text(done.output)
    return run


def too_long(text: str, width: int) -> list[str]:
    """Return the lines that a terminal would break, but for words as long: paths, values of options."""
    lines = [line for line in text.splitlines() if len(line) > width]
    return [line for line in lines if " " in re.sub(r"^--\S+ | \\$", "", line.strip())]


def test_a_run_of_two_ranks_prints_lines_that_fit(run_dir):
    printed = (run_dir.parent / "printed").read_text()
    assert not too_long(printed, 80), "\n".join(too_long(printed, 80))
    train = printed.partition("  train further\n")[2].partition("  your own run")[0]
    words = shlex.split(train.replace("\\\n", ""), comments=True)
    assert words[:3] == ["mpirun", "-n", "2"] and "run.steps=4" in words, train


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_lines_fit(run_dir, tmp_path, command, width):
    words = shlex.split(command.format(run=run_dir, scratch=tmp_path))
    done = CliRunner().invoke(cli, words, env={"COLUMNS": str(width)}, prog_name="mpitrain")
    assert done.output and not too_long(done.output, width), "\n".join(too_long(done.output, width))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", OTHERS)
def test_lines_of_a_process_of_its_own_fit(run_dir, command, width):
    words = shlex.split(command.format(run=run_dir))
    done = finished([MPITRAIN, *words], capture_output=True, text=True, env=environment(COLUMNS=str(width)))
    printed = done.stdout + done.stderr
    assert printed and not too_long(printed, width), printed


def on_a_terminal(folder, command: str, columns: int) -> str:
    """Return what a terminal gets of a command."""
    shell = f"stty cols {columns}; {command}"
    finished(
        ["script", "-qec", f"bash -c {shlex.quote(shell)}", "log"],
        cwd=folder,
        env=environment(COLUMNS=None, TERM="xterm"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    return (folder / "log").read_text(errors="replace")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("columns", [80, 100])
def test_under_mpirun_there_is_a_bar_on_a_terminal_and_only_there(run_dir, tmp_path, columns):
    keys = shlex.join(
        tiny(tmp_path / "run", run_dir.parent / "text.txt", run_steps=3, run_save_every=0, run_eval_every=0)
    )
    command = shlex.join([MPIRUN, "-n", "2", *preloaded([MPITRAIN]), "run"])
    printed = on_a_terminal(tmp_path, f"{command} {keys}", columns)
    assert re.search(r"step 3/3  loss \d\.\d+  [^\n]*━[^\n]* 0:00:00 left", printed), tail(printed)
    screens = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed).replace("\r", "\n")
    assert not too_long(screens.partition("\nScript done")[0].partition("\n")[2], columns), tail(screens)
    again = f"{keys} --set run.steps=4"
    on_a_terminal(tmp_path, f"{command} {again} > file 2>&1", columns)
    text = (tmp_path / "file").read_text()
    assert re.search(r"^\d{4}-\d\d-\d\d .* step     4  loss ", text, re.MULTILINE), text
    assert not re.search(r"[\x00-\x08\x0b-\x1f━]", text), text


@pytest.mark.parametrize(
    ("options", "is_one"),
    [
        ("", True),
        ("-n 2 --oversubscribe", True),
        ("-l", False),
        ("-prepend-rank", False),
        ("--tag-output", False),
        ("--output=tag", False),
        ("-n 1 mpitrain -l", True),
    ],
)
def test_a_launcher_that_marks_lines_has_no_terminal(tmp_path, options, is_one):
    """A bar would be drawn anew below each mark."""
    ask = (
        "import os, sys; sys.path.insert(0, os.environ['HERE']); from mpitrain.cluster.std_streams import "
        "terminal_of; print('one' if terminal_of(os.getppid(), 1) else 'none')"
    )
    script = tmp_path / "launches"
    script.write_text(f'#!/bin/bash\n"{sys.executable}" -P -c "{ask}"\ntrue\n')
    script.chmod(0o755)
    found = on_a_terminal(tmp_path, f"HERE={os.getcwd()} ./launches {options}", 80)
    assert ("one" in found.split()) == is_one, found
    assert terminal_of(2**22 + 1, 1) is None
