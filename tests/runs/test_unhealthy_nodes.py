"""A node that errs or is slow is found by the run, and `mpitrain supervise` restarts it on a spare one."""

import json
import os
import sys
from pathlib import Path

import pytest
import unhealthy_srun
from conftest import LONG
from launch import MPIRUN, MPITRAIN, loss_lines, preloaded, run_tiny, started, tail, tiny, write_text

from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.unhealthy_nodes import note, noted, num_spares
from mpitrain.commands.job.spare_nodes import SpareNodes

SETTINGS = dict(run_steps=24, run_save_every=8, run_eval_every=8, comm_slow_after=4)
SLOW = {"node": "b", "what": "slow"}
ERRS = {"node": "b", "rank": 1, "step": 10, "what": "weight"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("unhealthy") / "text.txt", 60_000)


@pytest.fixture
def allocation(tmp_path, monkeypatch):
    """An allocation of four nodes, a to d, of which b can be unhealthy."""
    programs = {
        "srun": f'#!/bin/sh\nexec {sys.executable} {unhealthy_srun.__file__} "$@"\n',
        "scontrol": "#!/bin/sh\nprintf '%s\\n' a b c d\n",
    }
    (tmp_path / "bin").mkdir()
    for name, script in programs.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "site")
    return tmp_path


def supervised(run_dir: Path, text: Path, unhealthy: dict, count: int, **settings):
    """Run on `count` of the allocation's nodes, a rank on each."""
    words = [MPITRAIN, "supervise", "--nodes", str(count), "srun", MPITRAIN, "run"]
    path = os.pathsep.join([str(Path(unhealthy_srun.__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {"UNHEALTHY": json.dumps(unhealthy), "MPIRUN_OF_TESTS": MPIRUN, "PYTHONPATH": path}
    env["PRELOADED"] = json.dumps(preloaded([MPITRAIN])[:-1])
    command = [*words, *tiny(run_dir, text, **SETTINGS | settings)]
    with started(0, *command, env=env, forked=False) as job:
        return job.wait(180)


def starts(output: str) -> list[str]:
    return [line.removeprefix("srun on ") for line in output.splitlines() if line.startswith("srun on ")]


@pytest.mark.parametrize("every", [0, pytest.param(1, marks=LONG)])
def test_a_slow_node_is_replaced_and_the_run_has_the_same_bits(allocation, text, every):
    keys = dict(parallel_dp=2, recovery_every=every, recovery_partner="auto" if every else 0)
    run_dir = allocation / "run"
    done = supervised(run_dir, text, SLOW, 2, recovery_replace_slow=2.0, **keys)
    assert done.returncode == 0 and starts(done.output) == ["a b", "a c"], tail(done.output, 40)
    assert "as node b is slow (recovery.replace_slow)" in done.output, tail(done.output, 40)
    assert "excluded b: it is slow" in done.output, tail(done.output, 40)
    assert list(noted(RunDir(run_dir))) == ["b"]
    whole = run_tiny(2, allocation / "whole", text, **SETTINGS, parallel_dp=2)
    assert whole.returncode == 0 and loss_lines(run_dir) == loss_lines(allocation / "whole")


@LONG
def test_a_slow_node_stays_where_there_is_no_other(allocation, text):
    done = supervised(allocation / "run", text, SLOW, 4, recovery_replace_slow=2.0, parallel_dp=4)
    assert done.returncode == 0 and starts(done.output) == ["a b c d"], tail(done.output, 40)
    assert "rank 1 on b is slow" in done.output, tail(done.output, 40)


@LONG
def test_a_node_that_errs_is_replaced(allocation, text):
    """Three data ranks: the majority knows who is wrong."""
    keys = dict(parallel_dp=3, parallel_zero=0, numerics_check_every=4, batch_global=12)
    done = supervised(allocation / "run", text, ERRS, 3, **keys)
    assert done.returncode == 0 and starts(done.output) == ["a b c", "a c d"], tail(done.output, 40)
    assert "excluded b: " in done.output and "is not that of the other 2" in done.output


def test_unhealthy_nodes_are_left_out_only_while_there_are_others(allocation):
    nodes = SpareNodes(3, 1)
    assert nodes.num_spare == 1
    assert (
        nodes.exclude_unhealthy({"b": "it is slow", "c": "it errs", "x": "other"}) == "excluded b: it is slow"
    )
    assert nodes.excluded == ["b"] and nodes.num_spare == 0
    assert nodes.exclude_unhealthy({"c": "it errs"}) == ""


def test_damaged_lines_name_no_node(tmp_path):
    rundir = RunDir(tmp_path)
    assert noted(rundir) == {}
    note(rundir, 7, ["a"], "it errs")
    with rundir.unhealthy.open("ab") as file:
        file.write(b'nothing\n[]\n{"node": 1, "why": ""}\n\xff\n' + 100_000 * b"[" + b"\n")
    note(rundir, 9, ["b"], "it is slow")
    assert noted(rundir) == {"a": "it errs", "b": "it is slow"}


@pytest.mark.parametrize(("value", "number"), [("2", 2), ("", 0), ("-1", 0), ("many", 0)])
def test_spares_are_a_number(value, number):
    assert num_spares({"MPITRAIN_SPARE_NODES": value}) == number
