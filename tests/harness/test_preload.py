"""A rank whose libraries were loaded before is started, told, heard and ended like any other."""

import os
import signal
import sys
import time

import launch
import pytest
from conftest import LONG
from launch import mpirun, patience, preloaded, started, tail

REPORTS = """
import os, sys
assert "torch" in sys.modules and __name__ == "__main__"
from mpi4py import MPI
MPI.Init()
world = MPI.COMM_WORLD
seen = world.allgather((sys.argv[1:], os.getcwd(), os.environ["SAID"]))
assert len(set(map(str, seen))) == 1, seen
rank = world.rank
print(f"{seen[0]} {world.size}", flush=True)
MPI.Finalize()
sys.exit(rank * 7)
"""
DIES = """
import os, signal, sys
os.kill(os.getpid(), signal.Signals(int(sys.argv[1])))
"""
STAYS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
open(sys.argv[1], "w").write(str(os.getpid()))
while True:
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def there_is_one():
    if preloaded(["x.py"]) == ["x.py"]:
        pytest.skip("under this MPI, or here, every rank starts from nothing")


def program(folder, text):
    path = folder / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_it_has_what_the_launcher_gave_and_ends_with_its_own_code(tmp_path):
    done = mpirun(2, *program(tmp_path, REPORTS), "a b", env={"SAID": "x=ü"}, cwd=tmp_path)
    assert done.returncode == 7, tail(done.output)
    assert f"(['a b'], '{tmp_path}', 'x=ü') 2" in done.output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_that_ends_it_ends_the_one_that_stands_for_it(tmp_path, number):
    with started(0, *preloaded([*program(tmp_path, DIES), str(int(number))])) as job:
        assert job.wait(30).returncode == -number, job.text()


def test_it_hears_signals_and_dies_with_the_other(tmp_path):
    pid_file = tmp_path / "pid"
    with started(0, *preloaded([*program(tmp_path, STAYS), str(pid_file)])) as job:
        job.wait_for(lambda: pid_file.exists() and pid_file.read_text(), 30)
        job.signal(job.process.pid, signal.SIGUSR1)
        job.wait_for(lambda: "heard" in job.text(), 10)
    limit = time.monotonic() + patience(10)
    while time.monotonic() < limit:
        if not os.path.exists(f"/proc/{pid_file.read_text()}"):
            return
        time.sleep(0.01)
    pytest.fail("it lives on")


SEES = "import os, torch; print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'), torch.cuda.is_available())"


def test_what_a_test_starts_sees_no_gpu(tmp_path):
    """A run with run.device=auto, as it is by default, computes on the CPU then, wherever tests run."""
    assert "sees  False" in mpirun(2, *program(tmp_path, SEES)).output


@pytest.mark.parametrize("given", [None, pytest.param("1", marks=LONG)])
def test_but_for_tests_of_the_gpu(tmp_path, monkeypatch, given):
    monkeypatch.setitem(launch.WITH_GPU, "CUDA_VISIBLE_DEVICES", given)
    assert f"sees {given} " in mpirun(1, *program(tmp_path, SEES), env=launch.WITH_GPU).output
