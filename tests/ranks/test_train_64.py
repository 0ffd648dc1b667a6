"""64 ranks train a tiny model as one rank does: tensor, pipeline, context and data parallelism at once.

By choice, it takes minutes.

    MPITRAIN_RANKS=64 python -m pytest -p no:cacheprovider tests/ranks/test_train_64.py

A rank takes 150 MB.
"""

import os
import sys

import pytest
from conftest import agree
from folders import SUPPORT
from launch import started, tail
from training import alone, trained

RANKS = 64
SETTINGS = (
    "precision.compute=fp64", "model.heads=4", "model.kv_heads=2", "data.sequence=16", "batch.global=16",
    "batch.micro=1",
    "comm.timeout_s=280",
)  # fmt: skip
LAYOUT = ("parallel.tp=2", "parallel.pp=4", "parallel.cp=2", "parallel.dp=4")


@pytest.mark.skipif(
    os.environ.get("MPITRAIN_RANKS") != str(RANKS), reason=f"MPITRAIN_RANKS={RANKS} starts {RANKS} ranks"
)
def test_many_ranks():
    lane = [sys.executable, str(SUPPORT / "lane.py"), "--only-mpi", "-p", "no:cacheprovider", "-q", __file__]
    # tests/support/preload.py is for fewer
    with started(RANKS, *lane, env={"OMP_NUM_THREADS": "1"}, forked=False) as job:
        done = job.wait(600)
    assert done.returncode == 0 and "1 passed" in done.output, tail(done.output)


@pytest.mark.mpi
def test_64_ranks_train_as_one(world):
    if world.size != RANKS:
        pytest.skip(f"MPITRAIN_RANKS={RANKS} starts {RANKS} ranks")
    (*found, _), (*expected, _) = trained(world, *SETTINGS, *LAYOUT)[0], alone(world, *SETTINGS)[0]
    worst = max(abs(a - b) / abs(b) for ours, theirs in zip(found, expected) for a, b in zip(ours, theirs))
    agree(
        world,
        len(found) == len(expected) and worst <= 1e-10,
        f"losses and norms {found}, of one rank {expected}",
    )
