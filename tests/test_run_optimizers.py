"""With every optimiser, a run goes on from its checkpoint in another division of the state, with the bits of the run without a stop."""

import json

import pytest
from conftest import EVERY
from launch import loss_lines, run_tiny, tail, write_text

KEYS = dict(run_save_every=4, run_eval_every=4, schedule_name="constant", parallel_dp=2)
STEPS = 10
CHOSEN = [("sgd", "fp32"), ("muon", "bf16"), *([("muon", "fp32"), ("adamw", "bf16")] if EVERY else [])]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("optimizers") / "text.txt")


@pytest.mark.parametrize(("name", "moments"), CHOSEN)
def test_a_run_goes_on_in_another_division_with_the_same_bits(tmp_path, text, name, moments):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    lines = {}
    for run_dir, steps, zero in ((whole, STEPS, 1), (stopped, 4, 3), (stopped, 8, 0), (stopped, STEPS, 2)):
        keys = dict(optimizer_name=name, optimizer_moments=moments, run_steps=steps, parallel_zero=zero)
        done = run_tiny(2, run_dir, text, **KEYS, **keys)
        assert done.returncode == 0, tail(done.output)
        lines[run_dir] = loss_lines(run_dir)
    assert "going on after step 8" in done.output
    assert lines[stopped] == lines[whole]
    losses = [json.loads(line)["val_loss"] for line in (lines[whole][0], lines[whole][-1])]
    assert losses[1] < losses[0]


def test_bf16_moments_are_saved_as_such_and_go_on_as_nothing_else(tmp_path, text):
    import h5py

    from mpitrain.checkpoint.dtypes import BF16, dtype_of

    run_dir, keys = tmp_path / "run", KEYS | dict(parallel_dp=1, run_steps=3)
    lines = []
    for pp, steps in ((1, 3), (2, 6), (1, 6)):  # the last on its own, without a stop
        into = run_dir if pp == 2 or steps == 3 else tmp_path / "whole"
        done = run_tiny(pp, into, text, **keys | dict(parallel_pp=pp, run_steps=steps, optimizer_moments="bf16"))
        assert done.returncode == 0, tail(done.output)
        lines.append(loss_lines(into))
    assert [json.loads(line)["loss"] for line in lines[1][1:]] == [json.loads(line)["loss"] for line in lines[2][1:]]
    with h5py.File(run_dir / "checkpoints" / "step-00000006" / "shard-00000.h5") as shard:
        found = {}
        shard.visititems(lambda name, x: found.setdefault(name.split("/")[0], set()).add(dtype_of(x)) if hasattr(x, "dtype") else None)
    assert found["adam"] == {BF16} and BF16 not in found["parameters"]
    done = run_tiny(1, run_dir, text, **keys | dict(parallel_pp=1, run_steps=8))
    assert done.returncode == 2 and "holds a run with optimizer.moments = 'bf16', this one has 'fp32'" in done.output, tail(done.output)
    assert "Traceback" not in done.output
