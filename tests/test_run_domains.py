"""A run whose stages have buckets of two domains saves every part of its state once, and goes on in an ordinary layout."""

import json
import sys

import pytest
from launch import MPITRAIN, mpirun

TWO_DOMAINS = """
from mpitrain.layout import stages
from mpitrain.cli import main
from mpitrain.layout.buckets import buckets_of
from mpitrain.layout.domains import DENSE, DOMAINS, Domain

def buckets(*arguments):
    return [each._replace(domain=(DENSE, "other")[number % 2]) for number, each in enumerate(buckets_of(*arguments))]

DOMAINS["other"] = Domain("dp", "cp", "dp", lambda config: config.parallel.dp)
stages.buckets_of = buckets
main()
"""
SETTINGS = ("model.layers=2", "parallel.dp=2", "precision.compute=fp64", "data.sequence=64", "batch.global=8", "comm.bucket_mb=0.1")
SHARDED = ("parallel.cp=2", "parallel.zero=1", "parallel.dp_shard=1")


def losses(folder):
    return [line["loss"] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line["step"]]


def test_a_checkpoint_of_two_domains_is_whole(tmp_path):
    """Of four data ranks the first two divide one domain, the first and the third the other: three have something to save."""
    (tmp_path / "two.py").write_text(TWO_DOMAINS)
    given = [word for key in (*SETTINGS, "run.save_every=0") for word in ("--set", key)]
    found = []
    for name, program, shards in (("two", (sys.executable, str(tmp_path / "two.py")), 3), ("one", (MPITRAIN,), 2)):
        folder = tmp_path / name
        sharded = [word for key in SHARDED for word in ("--set", key)]
        done = mpirun(4, *program, "run", *given, *sharded, "--set", "run.steps=2", "--set", f"run.dir={folder}")
        assert done.returncode == 0, done.output
        assert len(list(folder.glob("checkpoints/step-00000002/shard-*.h5"))) == shards
        done = mpirun(2, MPITRAIN, "run", *given, "--set", "run.steps=3", "--set", f"run.dir={folder}")
        assert done.returncode == 0 and "going on after step 2" in done.output, done.output
        found.append(losses(folder))
    assert len(found[0]) == 3 and found[0] == pytest.approx(found[1], rel=1e-12)
