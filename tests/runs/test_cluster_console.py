"""Where a watchdog speaks: a launcher's own standard error, whatever that is, and once."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import LONG, but_for
from effort import cases
from launch import MPIRUN, environment, finished, patience, tail

from mpitrain.cluster import console
from mpitrain.cluster.processes import parents_of

SAY = """
import sys
from mpitrain.cluster import console, watchdog_rendezvous
if sys.argv[1] == "refused":
    watchdog_rendezvous._duplicate = lambda pid: None
console.Console(watchdog_rendezvous.stderr_of_launcher()).say("what happened")
"""


def test_parents_are_named():
    """Up to the first process, which is no launcher: tests may have no other above them."""
    with subprocess.Popen(
        ["bash", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as shell:
        child = int(shell.stdout.readline())
        found = list(parents_of(child))
        os.kill(child, signal.SIGKILL)
    assert found[0] == (shell.pid, "bash") and 1 not in dict(found)
    assert [pid for pid, _ in found[1:2]] == [pid for pid in [os.getpid()] if pid > 1]


def said(tmp_path, to, how, name="prterun"):
    """Return what comes out of a launcher whose standard error goes `to`, when its child speaks.

    The child's own goes to `own`.
    """
    launcher = tmp_path / name
    launcher.write_text('#!/bin/bash\n"$@" 2> own\necho the launcher >&2 2>/dev/null\n')
    launcher.chmod(0o755)
    (tmp_path / "own").write_text("")
    (tmp_path / "log").write_text("")
    (tmp_path / "say.py").write_text(SAY)
    script = f"./{name} {sys.executable} say.py {how}"
    shell = f"script -qec '{script}' log > /dev/null" if to == "a terminal" else f"{script} {to}"
    finished(
        ["bash", "-c", shell],
        cwd=tmp_path,
        env=environment(PMIX_RANK="0"),
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    return (tmp_path / "log").read_text().splitlines(), (tmp_path / "own").read_text().splitlines()


@pytest.mark.parametrize("how", ["allowed", "refused"])
@pytest.mark.parametrize("to", ["2>> log", "2>&1 | cat > log", "a terminal"])
def test_it_is_said_on_the_stderr_of_the_launcher(tmp_path, to, how):
    lines = [line.rstrip().removeprefix("\x1b[K") for line in said(tmp_path, to, how)[0]]  # over a live line
    assert [line for line in lines if "what" in line] == ["what happened"]
    assert said(tmp_path, to, how)[1] == []


def test_in_a_file_the_launcher_writes_after_it(tmp_path):
    assert said(tmp_path, "2> log", "allowed") == (["what happened", "the launcher"], [])


@pytest.mark.parametrize(("to", "how"), [("2> log", "refused"), ("2>&-", "allowed"), ("2>&-", "refused")])
def test_where_that_would_do_harm_it_is_said_on_the_own_one(tmp_path, to, how):
    """A file would be written over.

    And a launcher without standard error has something of its own under its number.
    """
    assert said(tmp_path, to, how)[1] == ["what happened"]


def test_another_launcher_is_left_alone(tmp_path):
    assert said(tmp_path, "2>> log", "allowed", name="another")[1] == ["what happened"]


def test_nobody_is_waited_for_who_does_not_read(monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 0.2)
    reads, writes = os.pipe()
    console.write(writes, "a report " * 100_000)
    os.close(reads)
    console.write(writes, "to nobody")
    os.close(writes)


FULL = """
import os
for number in (1, 2):
    os.set_blocking(number, False)
    try:
        while True:
            os.write(number, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(number, True)
print("more")
"""
ENDS = {
    "from mpitrain.comm.base.world import abort; abort(3)": 3,
    "from mpitrain.comm.base.world import abort, start; start(); abort(3)": 3,
    "from mpitrain.cluster.guard import Guard; Guard().end('why')": 1,
}


@LONG
@pytest.mark.parametrize("ends", ENDS)
def test_a_rank_ends_though_nobody_reads_what_it_says(ends):
    """MPI says that it aborts, too; no watchdog ends this rank."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(PYTHONUNBUFFERED=None)}
    with subprocess.Popen([sys.executable, "-c", FULL + ends], **pipes) as rank:
        try:
            assert rank.wait(patience(30)) == ENDS[ends]
        finally:
            rank.kill()


EXITS = """
import os
from mpitrain.cluster.guard import Guard
guard = Guard()
guard.place.enter("build", "building")
world = guard.connect()
os._exit(3) if world.rank == 1 else world.barrier("none comes")
"""


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "to",
    but_for(
        ["> log 2>&1", ">> log 2>&1", "2>&1 | cat > log", "a terminal"],
        longer=[">> log 2>&1", "2>&1 | cat > log"],
    ),
)
def test_a_rank_that_exits_is_reported_once_wherever_the_output_goes(tmp_path, to):
    """Launchers may read no more of what ranks say then."""
    (tmp_path / "exits.py").write_text(EXITS)
    command = f"{MPIRUN} -n 2 {sys.executable} exits.py"
    shell = f"script -qec '{command}' log > /dev/null" if to == "a terminal" else f"{command} {to}"
    finished(["bash", "-c", shell], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, timeout=60)
    output = (tmp_path / "log").read_text(errors="replace")
    assert (
        len(re.findall("mpitrain: rank 1 of 2 in phase build, .*: the process is gone: killed", output)) == 1
    ), tail(output)


@pytest.mark.parametrize(
    "exits", ["os._exit(0)", pytest.param("__import__('ctypes').CDLL(None).exit(0)", marks=LONG)]
)
def test_a_job_of_which_a_rank_exits_with_0_fails(tmp_path, exits):
    """MPICH's mpirun takes it for success; here its pipes are held until it is told otherwise."""
    (tmp_path / "exits.py").write_text(EXITS.replace("os._exit(3)", exits))
    command = (MPIRUN, "-n", "2", sys.executable, "exits.py")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    for again in range(cases(1, 20)):
        done = finished(command, cwd=tmp_path, env=environment(), timeout=60, **pipes)
        output = done.stdout.decode(errors="replace")
        assert done.returncode, (again, tail(output))
        found = re.findall("mpitrain: rank 1 of 2 in phase build.*: the process is gone: .*exit.*", output)
        assert len(found) == 1, (again, tail(output))


KILLED = """
def killed(pid):
    os.kill(os.getpid(), 9)
def killed_with_launcher(pid):
    # whose descriptors are closed when it is a zombie, and not before
    dies = f"while test -e /proc/{os.getpid()} && ! grep -q ') Z' /proc/{os.getpid()}/stat; do :; done"
    subprocess.Popen(["sh", "-c", f"{dies}; kill -9 {pid}"], start_new_session=True)
    killed(pid)
if guard.place.rank == 2:
    WHAT(next(pid for pid, name in parents_of(os.getpid()) if name in ("mpirun", "mpiexec", "prterun")))
"""


def report_of_killed(path, what):
    """Return the line that is said when a rank ends so in MPI_Init."""
    imports = "import subprocess\nfrom mpitrain.cluster.processes import parents_of\n"
    (path / "killed.py").write_text(
        imports + EXITS.replace("world = ", KILLED.replace("WHAT", what) + "world = ", 1)
    )
    # to the end of all that write there: the launcher may be gone before the watchdog speaks
    said = finished(
        (MPIRUN, "-n", "4", sys.executable, "killed.py"),
        cwd=path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    output = said.stdout.decode(errors="replace")
    # the launcher's end makes MPICH's proxy kill the others, and one of them may be missed first
    rank = "rank . of 4 in phase" if what == "killed_with_launcher" else "rank 2 of 4 in phase build"
    found = re.findall(f"mpitrain: {rank}.*: the process is gone: killed.*", output)
    assert len(found) == 1 and output.count("mpitrain: ") == 1, tail(output)
    return found[0]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("number", but_for(range(5), longer=range(1, 5)))
def test_a_rank_that_is_killed_in_mpi_init_is_reported(tmp_path, number):
    """MPICH's proxy is then about to answer it now and then, and ends with what it has not forwarded."""
    report_of_killed(tmp_path, "killed")


def test_a_rank_is_reported_though_the_launcher_ends_with_it(tmp_path):
    """MPICH's may crash of a rank that is killed; here it is killed as soon as the rank is gone."""
    reports = (report_of_killed(tmp_path, "killed_with_launcher") for _ in range(20))
    assert any("and so is the launcher (" in report for report in reports)
