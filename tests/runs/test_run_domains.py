"""A run whose stages have buckets of two domains saves every part of its state once, and resumes in
an ordinary layout.
"""

import json

import pytest
from conftest import LONG
from launch import run_commands, tail

TWO_DOMAINS = """
import json, sys
from pathlib import Path
import command_sequence
from mpitrain.plan.division import stages
from mpitrain.plan.division.buckets import buckets_of
from mpitrain.plan.division.domains import DENSE, DOMAINS, Domain

def buckets(*arguments):
    found = enumerate(buckets_of(*arguments))
    return [each._replace(domain=(DENSE, "other")[number % 2]) for number, each in found]

def two_domains(number):
    if commands[number] is not commands[-1]:
        return
    DOMAINS["other"] = Domain("dp", "cp", "dp", lambda config: config.parallel.dp)
    stages.buckets_of = buckets

commands = json.loads(sys.argv[2])
command_sequence.main(Path(sys.argv[1]), commands, before=two_domains)
"""
SETTINGS = (
    "model.layers=2",
    "parallel.dp=2",
    "precision.compute=fp64",
    "data.sequence=64",
    "batch.global=8",
    "comm.bucket_mb=0.1",
)
SHARDED = ("parallel.cp=2", "parallel.zero=1", "parallel.dp_shard=1")


def losses(folder):
    return [
        line["loss"]
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if line["step"]
    ]


@LONG
def test_a_checkpoint_of_two_domains_is_whole(tmp_path):
    """Of four data ranks the first two divide one domain, the first and the third the other.

    Three have something to save.
    """
    (tmp_path / "two.py").write_text(TWO_DOMAINS)
    given = [word for key in (*SETTINGS, "run.save_every=0") for word in ("--set", key)]
    sharded = [word for key in SHARDED for word in ("--set", key)]
    folders = {"one": tmp_path / "one", "two": tmp_path / "two"}  # the second with two domains
    on_four = [
        ("run", *given, *sharded, "--set", "run.steps=2", "--set", f"run.dir={folder}")
        for folder in folders.values()
    ]
    for done in run_commands(4, *on_four, program=tmp_path / "two.py"):
        assert done.returncode == 0, tail(done.output)
    assert [
        len(list(folder.glob("checkpoints/step-00000002/shard-*.h5"))) for folder in folders.values()
    ] == [2, 3]
    for done in run_commands(
        2,
        *(
            ("run", *given, "--set", "run.steps=3", "--set", f"run.dir={folder}")
            for folder in folders.values()
        ),
    ):
        assert done.returncode == 0 and "resuming after step 2" in done.output, tail(done.output)
    one, two = map(losses, folders.values())
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-12)
