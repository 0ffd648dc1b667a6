"""A run whose memory errs is told so, with rank, node and tensor, and saves nothing of it."""

import json
import os
import re
import sys
from pathlib import Path

import bit_flip
import pytest
from conftest import LONG
from launch import loss_lines, mpirun, run_tiny, tail, tiny, write_text

SETTINGS = dict(run_steps=8, run_save_every=4, run_eval_every=8)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("flips") / "text.txt", 20_000)


def run(run_dir: Path, text: Path, plan: dict, env: dict[str, str] | None = None, **changes):
    return mpirun(
        4,
        sys.executable,
        bit_flip.__file__,
        json.dumps(plan),
        "run",
        *tiny(run_dir, text, **SETTINGS | changes),
        env=env,
    )


def test_a_bit_flipped_in_the_weights_of_a_replica_ends_the_run_before_it_is_saved(tmp_path, text):
    plan = {"rank": 2, "step": 6, "what": "weight"}
    done = run(tmp_path / "run", text, plan, parallel_dp=4, parallel_zero=0, numerics_check_every=2)
    assert done.returncode == 1 and "flipped a bit" in done.output, tail(done.output)
    (message,) = [line for line in done.output.splitlines() if line.startswith("corrupted after step 6")]
    assert re.search(
        rf"(weights|master)/\S+ of rank 2 on {re.escape(os.uname().nodename)} is not that of the other 3",
        message,
    ), message
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000004"
    ]


@LONG
def test_a_rollback_hides_no_corruption(tmp_path, text):
    """Batch 5, which step 6 reads, is noise.

    A spike, in the step in which the bit flips and replicas are compared.
    """
    plan = {"rank": 2, "step": 6, "what": "weight"}
    keys = dict(parallel_dp=4, parallel_zero=0, numerics_check_every=2)
    keys |= dict(
        schedule_warmup=0, optimizer_lr=0.01, spikes_do="rollback", spikes_window=4, spikes_threshold=0.1
    )
    done = run(tmp_path / "run", text, plan, {"NOISE": "[5]"}, **keys)
    assert "flipped a bit" in done.output and "step 6 is a spike" in done.output, tail(done.output)
    assert done.returncode == 1, tail(done.output)
    assert "corrupted after step 6" in done.output, tail(done.output)
    assert "rolled back" not in done.output, tail(done.output)


@LONG
def test_a_bit_flipped_in_the_gradient_of_one_step_is_found_and_put_right(tmp_path, text):
    keys = dict(parallel_dp=2, parallel_pp=2)
    plan = {"rank": 1, "step": 6, "what": "gradient"}
    done = run(tmp_path / "run", text, plan, **keys, numerics_rerun_every=3)
    assert done.returncode == 0 and "flipped a bit" in done.output, tail(done.output)
    (message,) = [line for line in done.output.splitlines() if "computed again" in line]
    assert re.search(
        rf"step 6: .*: rank 1 on {re.escape(os.uname().nodename)}, in REDUCE.*transient", message
    ), message
    clean = run_tiny(4, tmp_path / "clean", text, **SETTINGS, **keys)
    assert clean.returncode == 0, tail(clean.output)
    assert loss_lines(tmp_path / "run") == loss_lines(tmp_path / "clean"), tail(clean.output)
