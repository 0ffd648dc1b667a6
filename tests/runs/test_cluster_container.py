"""In a container that forbids processes to read each other's memory, ranks train as elsewhere."""

import platform
import sys
from pathlib import Path

import pytest
from conftest import LONG
from launch import MPIRUN, MPITRAIN, mpirun, tail, tiny, write_text

FORBIDDING = str(Path(__file__).parents[1] / "support" / "without_ptrace.py")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is one for x86-64")


def test_ranks_send_each_other_large_messages(tmp_path):
    """MPICH would read them where they lie, and fail."""
    large = dict(data_sequence=256, run_steps=1, run_eval_every=0, parallel_pp=2)
    command = MPITRAIN, "run", *tiny(tmp_path / "run", write_text(tmp_path / "text.txt"), **large)
    done = mpirun(0, sys.executable, FORBIDDING, MPIRUN, "-n", "2", *command, forked=False)
    assert done.returncode == 0, tail(done.output)


@LONG
def test_doctor_says_so():
    done = mpirun(0, sys.executable, FORBIDDING, MPITRAIN, "doctor", forked=False)
    assert done.returncode == 0 and "process_vm_readv (CMA) is forbidden here" in done.output, tail(
        done.output
    )
