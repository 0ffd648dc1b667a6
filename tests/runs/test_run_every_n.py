"""`mpirun -n N mpitrain run` needs no other argument, for any N.

The default batch divides by many, so the training is the same.

MPITRAIN_EFFORT=all takes more N. What each becomes is in tests/unit/plan/test_config.py.
"""

import json

import pytest
from conftest import EVERY, LONG
from launch import MPITRAIN, loss_lines, mpirun, options, tail


def two_steps(num_ranks, run_dir):
    """Run two steps without a configuration; return the losses: validation before, step 1, step 2."""
    done = mpirun(num_ranks, MPITRAIN, "run", *options({"run.steps": 2, "run.dir": run_dir}), timeout=115)
    assert done.returncode == 0, tail(done.output)
    assert done.output.count(f"ranks: {num_ranks},") == 1, "each rank believes to be alone"
    assert f"mpitrain generate {run_dir}" in done.output
    assert "error" not in done.output.lower(), "what an MPI says to itself doesn't help a user"
    first, *steps = map(json.loads, loss_lines(run_dir))
    assert first["step"] == 0 and [line["step"] for line in steps] == [1, 2]
    return [first["val_loss"], *(line["loss"] for line in steps)]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    return two_steps(1, tmp_path_factory.mktemp("every-n") / "run")


def test_one_rank_learns(on_one_rank):
    assert 4.9 < on_one_rank[0] < 5.7  # ln 256 = 5.55; a tied embedding favours the same byte again
    assert 4 < on_one_rank[2] < on_one_rank[1] < 5.7


@LONG
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8] if EVERY else [6])
def test_several_ranks_learn_the_same(num_ranks, on_one_rank, tmp_path):
    assert two_steps(num_ranks, tmp_path / "run") == pytest.approx(on_one_rank, rel=1e-5)
