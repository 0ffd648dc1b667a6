"""Commands that other commands print are typed to their end, in one folder and with a tiny model.

Others are typed elsewhere: those of a run's end in test_run_hints.py, of plan and of the README.
"""

import os
import re
import shlex

import pytest
from launch import HERE, environment, finished, tail, tiny, write_text
from pages import commands

STEPS = 2
TINY = shlex.join(tiny("", "text.txt", run_steps=STEPS, run_eval_every=0))
SHORT = f" --set run.steps={STEPS}"
# what is typed, what it prints of a command, what is typed of that, and what this prints
PRINTED = {
    "run, traced": (
        "mpirun -n 2 mpitrain run {tiny} --set run.dir=runs/traced --set parallel.pp=2 --set run.trace=1",
        r"^traced 1 step: (mpitrain schedule compare --trace .*)$",
        "{}",
        "measured",
    ),
    "run, of a directory": (
        "mpitrain run runs/a",
        r"give (runs/a/config.toml)$",
        "mpitrain run {} --set run.steps=3",
        "done: 3 steps",
    ),
    "run, of too few steps": (
        "mpitrain run runs/a/config.toml --set run.steps=1",
        r"set (run.steps above \d+) to train further",
        "mpitrain run runs/a/config.toml --set run.steps=4",
        "done: 4 steps",
    ),
    "run, with another trainer's option": (
        "mpitrain run runs/a/config.toml --resume",
        r"(the same command) resumes from the newest checkpoint",
        "mpitrain run runs/a/config.toml",
        "done: ",
    ),
    "run, by another trainer's name": (
        "mpitrain train",
        r"use (mpitrain run)$",
        "{} {tiny} --set run.dir=runs/train",
        "done: 2 steps",
    ),
    "doctor": ("mpitrain doctor", r"needs 2 ranks: (mpirun -n 2 mpitrain doctor)$", "{}", "GB/s"),
    "export, import": (
        "mpitrain export runs/a --to hf && mpitrain import hf --to 'runs/an import'",
        r"train it: (mpitrain run .*)$",
        "{}" + SHORT,
        "done: 2 steps",
    ),
    "generate, of no run": (
        "mpitrain generate runs/none --prompt a",
        r"give the run directory of `(mpitrain run)`",
        "{} {tiny} --set run.dir=runs/none && mpitrain generate runs/none --prompt a --tokens 2",
        "done: 2 steps",
    ),
    "ckpt inspect": ("mpitrain ckpt inspect runs/a", r"(mpitrain ckpt verify .*)$", "{}", "whole"),
    "job, again": (
        "mpitrain job slurm runs/a/config.toml --nodes 1 --time 1:00:00 --out j.sh && "
        "mpitrain job slurm runs/a/config.toml --nodes 2 --time 1:00:00 --out j.sh",
        r"submit +sbatch (j.sh)$",
        "bash -n {} && grep nodes {}",
        "--nodes=2",
    ),
}


def typed(line, folder, ends_well=True):
    """Type a line in bash; return what it prints."""
    env = environment(PATH=f"{commands()}:{HERE}:{os.environ['PATH']}", COLUMNS=None)
    done = finished(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    printed = done.stdout + done.stderr
    assert done.returncode == 0 or not ends_well, f"{line}\n{tail(printed)}"
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run."""
    folder = tmp_path_factory.mktemp("typed")
    write_text(folder / "text.txt", 20_000)
    typed(f"mpitrain run {TINY} --set run.dir=runs/a", folder)
    return folder


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("case", PRINTED)
def test_a_command_that_is_printed_does_what_it_is_printed_for(folder, case):
    line, pattern, then, shown = PRINTED[case]
    printed = typed(line.replace("{tiny}", TINY), folder, ends_well=False)
    found = re.search(pattern, printed, re.MULTILINE)
    assert found, printed
    done = typed(then.replace("{tiny}", TINY).replace("{}", found[1]), folder)
    assert shown in done, tail(done)
